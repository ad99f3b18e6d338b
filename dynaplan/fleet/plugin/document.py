"""The statefile in the hands of its only writer, which rebuilds it from the running workers if it is lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dynaplan.config.settings.servers import server_addresses
from dynaplan.contract.gpus import visible_gpus
from dynaplan.fleet.circus_client import CircusClient
from dynaplan.fleet.launch import CurrentLaunch, Launch
from dynaplan.fleet.rules.restarting import after_process_ended
from dynaplan.fleet.rules.statefile import (
    Deployment,
    Document,
    fleet_of,
    initial,
    learnt_of,
    live_settings_of,
    planner_keys_of,
    with_commands,
    with_config,
    with_fleet,
    with_learnt,
    with_live_settings,
    with_planner_keys,
    with_services,
)
from dynaplan.fleet.statefile_store import DocumentStore
from dynaplan.fleet.watchers import worker_watcher
from dynaplan.graph.lifecycle import Worker, WorkerState
from dynaplan.graph.model import ServiceSpec
from dynaplan.process.ports import Processes
from dynaplan.util.errors import DynaplanError, StatefileCorrupt, StatefileUnwritable

if TYPE_CHECKING:
    from dynaplan.models.model import Learnt

log = logging.getLogger(__name__)


def new_document(launch: Launch) -> Document:
    addresses = {
        "frontend_url": launch.frontend_url,
        "circus_events": launch.circus_events,
        **server_addresses(os.environ),
        "runtime_dir": str(launch.runtime_dir),
        "log_dir": str(launch.log_dir),
    }
    return initial(
        Deployment(
            launch.graph,
            launch.gpus,
            launch.arbiter,
            launch.circus_endpoint,
            launch.config,
            commands_of(launch),
            addresses,
        )
    )


def commands_of(launch: Launch) -> dict[str, str]:
    """Return the command lines with which this process starts the workers of each component."""
    first = launch.graph.services[0]
    anybody = Worker("", first.name, first.role)
    return {
        service.name: worker_watcher(launch, replace(anybody, component=service.name)).command_line
        for service in launch.graph.services
    }


class Statefile:
    """The statefile's document, of which this process is the only writer; unknown fields in it are kept.

    ``is_written`` False: the document is new, and not in the file yet.
    """

    def __init__(
        self, store: DocumentStore, document: Document, launches: CurrentLaunch, *, is_written: bool
    ) -> None:
        self._store = store
        self._document = document
        self._launches = launches
        self._recorded = {each.name: each for each in fleet_of(document)}
        self._is_written = is_written

    @classmethod
    async def open(
        cls, store: DocumentStore, launch: Launch, circus: CircusClient, processes: Processes
    ) -> Statefile:
        """Open the document as the last writer left it.

        Make it anew from the running workers if it is spoilt.
        """
        try:
            document = store.read()
        except StatefileCorrupt as error:
            log.error("the statefile is lost, writing it anew: %s", error)
            document = None
        is_written = document is not None
        if document is None:
            document = with_fleet(new_document(launch), await running_workers(launch, circus, processes))
        document = with_commands(document, commands_of(launch))
        return cls(store, document, CurrentLaunch(launch), is_written=is_written)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return fleet_of(self._document)

    def has(self, workers: Mapping[str, Worker]) -> bool:
        """Tell whether exactly these workers, by name, are in the file."""
        return self._is_written and self._recorded == workers

    def record(self, workers: Iterable[Worker]) -> None:
        """Write these workers into the statefile in place of all others; raises StatefileUnwritable.

        After a reload its configuration is written, too, in the place of the one of ``serve``.
        """
        recorded, launch = {each.name: each for each in workers}, self._launches.now
        document = self._document
        if launch.is_reloaded:
            document = with_services(with_config(document, launch.config), launch.graph, commands_of(launch))
        self._replace(with_fleet(document, tuple(recorded.values())))
        self._recorded = recorded

    def record_ends(self, processes: Processes, now_s: float) -> None:
        """Write down that workers whose processes are gone are not ready, unless the disk forbids it."""
        workers = tuple(
            after_process_ended(each, now_s)
            if each.pid and processes.identify(each.pid) != each.started_at
            else each
            for each in self.workers
        )
        if workers != self.workers:
            try:
                self.record(workers)
            except StatefileUnwritable as error:
                log.warning("the ends of workers are not in the statefile yet: %s", error)

    @property
    def planner_keys(self) -> dict[str, str]:
        """The values of the planner's keys that were last written down, by name."""
        return planner_keys_of(self._document)

    @property
    def live_settings(self) -> dict[str, str]:
        """The values of the live settings that were last written down, by name."""
        return live_settings_of(self._document)

    @property
    def learnt(self) -> dict[str, Learnt]:
        """What was last written down of models that are loaded on request, by name."""
        return learnt_of(self._document)

    def record_learnt(self, learnt: Mapping[str, Learnt]) -> None:
        """Write down what was learnt of models; raises StatefileUnwritable."""
        self._replace(with_learnt(self._document, learnt))

    def record_keys(self, planner_keys: Mapping[str, str], live_settings: Mapping[str, str]) -> None:
        """Write the planner's keys and the live settings into the statefile; raises StatefileUnwritable."""
        document = with_planner_keys(self._document, planner_keys)
        if live_settings or self.live_settings:
            document = with_live_settings(document, live_settings)
        self._replace(document)

    def _replace(self, document: Document) -> None:
        self._store.write(document)
        self._document, self._is_written = document, True


async def running_workers(launch: Launch, circus: CircusClient, processes: Processes) -> tuple[Worker, ...]:
    """Return the workers that circus runs, with the GPUs of their environment: no GPU is given out twice."""
    workers = []
    for name in await circus.statuses():
        pid = await circus.pid(name)
        options = (await circus.call("options", name=name))["options"]
        environment = options.get("env") or {}
        service = _service_of(launch, options.get("args") or ())
        if service and pid and environment.get("DYNAPLAN_WORKER_NAME") == name:
            workers.append(
                Worker(
                    name,
                    service.name,
                    service.role,
                    gpus=_gpus(launch, service, environment.get("CUDA_VISIBLE_DEVICES", "")),
                    gpu_share=service.gpus if 0 < service.gpus < 1 else 1.0,
                    pid=pid,
                    started_at=processes.identify(pid) or 0,
                )
            )
    return tuple(workers)


async def present(
    workers: Sequence[Worker], circus: CircusClient, processes: Processes
) -> tuple[Worker, ...]:
    """Return these workers, with the processes that circus runs for them now where theirs are gone.

    The last writer may have started one anew while the disk was full: to take it for gone would give its
    GPUs out twice.
    """
    found = []
    for worker in workers:
        pid = worker.pid
        if pid and processes.identify(pid) != worker.started_at:
            try:
                pid = await circus.pid(worker.name) or pid
            except DynaplanError as error:
                log.debug("%s: %s", worker.name, error)
        if pid != worker.pid:
            log.warning("%s runs as %d, which could not be written down", worker.name, pid)
            state = WorkerState.STARTING if worker.state is WorkerState.READY else worker.state
            started_at = processes.identify(pid) or 0
            worker = replace(worker, state=state, pid=pid, started_at=started_at, instance_id=0, url="")
        found.append(worker)
    return tuple(found)


def _service_of(launch: Launch, args: Sequence[str]) -> ServiceSpec | None:
    after = [following for word, following in pairwise(args) if word == "--service-name"]
    return launch.graph.service(after[0]) if after else None


def _gpus(launch: Launch, service: ServiceSpec, mask: str) -> tuple[int, ...]:
    """Read the GPUs from ``CUDA_VISIBLE_DEVICES``; a worker without GPUs has only inherited the variable."""
    return tuple(gpu.index for gpu in visible_gpus(launch.gpus, mask)) if service.gpus else ()
