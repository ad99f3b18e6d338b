"""Metric pulls, every ``metric-pulling-interval``:

a worker that does not answer leaves a gap, not an exception.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dynaplan.engines.worker_load import WorkerLoad, kv_pressure
from dynaplan.events.prefill_requests import prefill_stream
from dynaplan.fleet.counts import FleetCounts, Sample, WorkerCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model.components import ScaledComponent
from dynaplan.store.instances import Instance, host_of

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.events.messaging_port import Messenger, WorkQueue
    from dynaplan.planner.ports import MetricsSource
    from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)

QUEUE_TIMEOUT_S = 1.0
"""Longest wait for the depth of the prefill queue, seconds."""


class Observer:
    """Reads the load of a deployment.

    ``instances`` gives the instances of a component; ``messenger`` connects to the prefill queue, and is
    called only once prefill workers are registered.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        instances: Callable[[str], Sequence[Instance]],
        metrics: MetricsSource,
        messenger: Callable[[], Awaitable[Messenger]],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._instances = instances
        self._metrics = metrics
        self._messenger = messenger
        self._clock = clock
        self._queue: WorkQueue | None = None
        self._is_queue_unavailable = False
        self._loads_by_host: dict[str, WorkerLoad] = {}

    def registered(self) -> FleetCounts:
        """Return the registered workers as a fleet without any others."""
        prefill = len(self._instances(self._settings.prefill_component))
        decode = len(self._instances(self._settings.decode_component))
        return FleetCounts(WorkerCounts(ready=prefill), WorkerCounts(ready=decode))

    def loads_by_host(self) -> Mapping[str, WorkerLoad]:
        """Return the newest load of the workers that have answered, by the host in their address."""
        return self._loads_by_host

    def components(self) -> list[ScaledComponent]:
        """Return the components whose workers are registered, with the models that they serve."""
        names = {
            Role.PREFILL: self._settings.prefill_component,
            Role.DECODE: self._settings.decode_component,
        }
        found = []
        for role, name in names.items():
            if instances := self._instances(name):
                models = {str(each.card["model"]) for each in instances if each.card.get("model")}
                found.append(ScaledComponent(role, name, tuple(sorted(models))))
        return found

    async def pull(self) -> Sample:
        """Pull the metrics once; takes a second at most."""
        fleet = self.registered()
        settings = self._settings
        loads, prefill, (depth, queue_missing) = await asyncio.gather(
            self._loads(settings.decode_component),
            self._loads(settings.prefill_component),
            self._queue_depth(fleet.prefill.ready),
        )
        asleep = sum(load.is_asleep for load in loads)
        prefill_asleep = sum(load.is_asleep for load in prefill)
        awake = [load for load in loads if not load.is_asleep]
        return Sample(
            at_s=self._clock.now_s(),
            kv_usage=sum(map(kv_pressure, awake)) / len(awake) if awake else None,
            kv_missing="" if awake else _why_no_load(fleet.decode.ready, asleep),
            prefill_queue=depth,
            queue_missing=queue_missing,
            waiting_requests=sum(load.waiting_requests for load in awake),
            prefill_workers=max(0, fleet.prefill.ready - prefill_asleep),
            decode_workers=max(0, fleet.decode.ready - asleep),
            decode_asleep=asleep,
            prefill_asleep=prefill_asleep,
        )

    async def close(self) -> None:
        """Close the connections to the workers."""
        await self._metrics.close()

    async def _loads(self, component: str) -> list[WorkerLoad]:
        """Return the loads of the component's workers that answer."""
        urls = [instance.url for instance in self._instances(component)]
        loads = await self._metrics.loads(urls) if urls else ()
        self._loads_by_host |= {host_of(url): load for url, load in zip(urls, loads, strict=True) if load}
        return [load for load in loads if load and math.isfinite(load.kv_usage)]

    async def _queue_depth(self, prefill_workers: int) -> tuple[float | None, str]:
        if not prefill_workers:
            return None, "no prefill worker is registered"
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                if self._queue is None:
                    messenger = await self._messenger()
                    self._queue = await messenger.queue(prefill_stream(self._settings.namespace))
                depth = await self._queue.depth()
        except Exception as error:
            # Whatever the client of the messaging server raises: the next pull tries again.
            self._log_unavailable(error)
            return None, "the prefill queue did not answer"
        self._is_queue_unavailable = False
        return float(depth), ""

    def _log_unavailable(self, error: Exception) -> None:
        level = logging.DEBUG if self._is_queue_unavailable else logging.WARNING
        log.log(level, "the prefill queue does not answer: %s: %s", type(error).__name__, error)
        self._is_queue_unavailable = True


def _why_no_load(registered: int, asleep: int) -> str:
    if not registered:
        return "no decode worker is registered"
    if asleep:
        return f"every decode worker that answers is asleep, {asleep} of {registered}: `dynaplan wake`"
    return f"none of the {registered} decode workers answered"
