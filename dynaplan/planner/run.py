"""Puts a planner together: as a service of a graph, and on its own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan import wiring
from dynaplan.domain.planner_settings import PlannerSettings
from dynaplan.planner.loop import PlannerLoop
from dynaplan.planner.observe import Observer

if TYPE_CHECKING:
    from dynaplan.ports import Clock, KeyValueStore, Messenger, Recorder
    from dynaplan.runtime.discovery import Discovery
    from dynaplan.runtime.process import WorkerRuntime

log = logging.getLogger(__name__)

WITHOUT_EFFECT = frozenset({"backend"})
"""Options of the original that are accepted and mean nothing here."""


async def start_planner(runtime: WorkerRuntime) -> None:
    """Plan in the background for as long as the process lives; raises ConfigError for a wrong option."""
    settings = settings_of(dict(runtime.settings) | {"namespace": runtime.namespace})
    planner = make_planner(settings, runtime.store, runtime.discovery, runtime.messenger, runtime.clock)
    runtime.on_stop(planner.close)
    runtime.spawn(planner.loop.run(), "planner")


def settings_of(options: Mapping[str, Any]) -> PlannerSettings:
    """The settings of a Planner section; raises ConfigError for a wrong one.

    A section written for a cluster means this box when ``serve`` runs it.
    """
    known = {key: value for key, value in options.items() if key not in WITHOUT_EFFECT}
    if known.get("environment") == "kubernetes":
        log.info("environment: kubernetes means local here: this planner scales this box")
        known["environment"] = "local"
    return PlannerSettings.from_options(known)


async def run_planner(settings: PlannerSettings) -> None:
    """Plan until cancelled, in a process of its own: ``ETCD_ENDPOINTS`` and ``NATS_SERVER`` say where."""
    from dynaplan.runtime.discovery import Discovery

    async with AsyncExitStack() as stack:
        store = wiring.connect_store()
        stack.push_async_callback(store.close)
        discovery = Discovery(store, settings.namespace)
        stack.push_async_callback(discovery.close)
        await discovery.start()
        messenger = _OnFirstUse(wiring.connect_messenger)
        stack.push_async_callback(messenger.close)
        planner = make_planner(settings, store, discovery, messenger, wiring.system_clock())
        stack.push_async_callback(planner.close)
        await planner.loop.run()


class Planner:
    """A planning loop and what it has open."""

    def __init__(self, loop: PlannerLoop, observer: Observer, recorders: Sequence[Recorder]) -> None:
        self.loop = loop
        self._observer = observer
        self._recorders = recorders

    async def close(self) -> None:
        """Close the connections to the workers, and the files."""
        await self._observer.close()
        for recorder in self._recorders:
            recorder.close()


def make_planner(
    settings: PlannerSettings,
    store: KeyValueStore,
    discovery: Discovery,
    messenger: Callable[[], Awaitable[Messenger]],
    clock: Clock,
) -> Planner:
    """A planner over these connections, not running yet."""
    observer = Observer(settings, discovery.instances, wiring.worker_metrics(), messenger, clock)
    connector = wiring.planner_connector(store, settings.namespace, observer.registered, clock)
    log_dir = log_directory(settings)
    log.info("what the planner sees and decides is written to %s", log_dir)
    recorders = wiring.planner_recorders(log_dir, settings)
    try:
        wiring.announce_log_dir(planner_log_root(), log_dir)
    except OSError as error:
        log.warning("`dynaplan why` may not find these decisions: %s", error)
    return Planner(PlannerLoop(settings, observer, connector, recorders, clock), observer, recorders)


def planner_log_root() -> Path:
    """Where the planners of this deployment log, each into a directory of its own."""
    return Path(os.environ.get("DYNAPLAN_LOG_DIR") or "logs") / "planner"


def log_directory(settings: PlannerSettings) -> Path:
    """``log-dir``, or else a directory named by the time."""
    if settings.log_dir:
        return Path(settings.log_dir)
    return planner_log_root() / time.strftime("%Y%m%d_%H%M%S")


class _OnFirstUse:
    """Connects when it is called first, and again when that failed; a call may give up on waiting."""

    def __init__(self, connect: Callable[[], Awaitable[Messenger]]) -> None:
        self._connect = connect
        self._connecting: asyncio.Future[Messenger] | None = None

    async def __call__(self) -> Messenger:
        if self._connecting is None or (self._connecting.done() and self._connecting.exception()):
            self._connecting = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._connecting)

    async def close(self) -> None:
        if self._connecting:
            self._connecting.cancel()
            for connected in await asyncio.gather(self._connecting, return_exceptions=True):
                if not isinstance(connected, BaseException):
                    await connected.close()
