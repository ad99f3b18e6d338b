"""Carries the newest decision out, step by step: what an earlier planner began is finished, too.

Level-triggered: each pass reads what was asked for and what is there, and makes the next steps that the
budget of GPUs allows. Workers that leave hold their GPUs until their pods have ended: others wait for these.

**Which pod goes.** Before a removal, pods of a Deployment are marked by what their workers hold, so that the
idlest is removed first: the annotation ``controller.kubernetes.io/pod-deletion-cost``, which the ReplicaSet
controller compares (Kubernetes 1.22 and later). It is set just before and not otherwise: its documentation
asks for few writes. A StatefulSet and a LeaderWorkerSet remove the highest number, whatever it holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import PODS, KubernetesClient
from dynaplan.kubernetes.intent import Change, Intent, IntentMap
from dynaplan.kubernetes.workloads import Workload, Workloads, WorkloadView, is_terminating, value_at
from dynaplan.planner.timing import EXECUTOR_IDLE_POLL_S, EXECUTOR_POLL_S
from dynaplan.util.errors import ClusterConflict, DynaplanError

log = logging.getLogger(__name__)

DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"


class DeletionCosts:
    """Writes the deletion costs of pods, by which Kubernetes chooses the pods to remove.

    ``loads`` gives the newest load of each worker by its host, a pod's address.
    """

    def __init__(self, client: KubernetesClient, loads: Callable[[], Mapping[str, WorkerLoad]]) -> None:
        self._client = client
        self._loads = loads

    async def mark(self, workload: Workload) -> None:
        """Write the cost of each pod of a Deployment whose load is known; never raises a DynaplanError."""
        if not workload.has_costs:
            return
        loads = self._loads()
        for pod in workload.pods:
            load = loads.get(str(value_at(pod, "status", "podIP")))
            cost = str(deletion_cost(load)) if load else ""
            if (
                not cost
                or is_terminating(pod)
                or value_at(pod, "metadata", "annotations", DELETION_COST_ANNOTATION) == cost
            ):
                continue
            try:
                name = pod["metadata"]["name"]
                await self._client.patch(
                    PODS, name, {"metadata": {"annotations": {DELETION_COST_ANNOTATION: cost}}}
                )
            except DynaplanError as error:
                log.warning("any pod of %s may be removed, busy or not: %s", workload.name, error.args[0])
                return


def deletion_cost(load: WorkerLoad) -> int:
    """Return what is lost with a worker: its requests, and of two with the same number its KV entries."""
    requests = load.running_requests + load.waiting_requests
    return 1000 * requests + round(999 * min(1.0, max(0.0, load.kv_usage)))


@dataclass(frozen=True)
class Budget:
    """GPUs that all workers may hold together (``gpus``).

    ``of_worker`` are those of one worker by role, for an object that does not say how many it asks for.
    """

    gpus: float
    of_worker: Mapping[Role, float]

    def gpus_of(self, workload: Workload) -> float:
        return workload.gpus or self.of_worker[workload.role]

    def held(self, view: WorkloadView) -> float:
        """Return the number of GPUs that all workloads hold, or have asked for."""
        return sum(each.holding * self.gpus_of(each) for each in view.workloads)


class Executor:
    """Carries out the decisions in ``intents`` on ``workloads``.

    ``before_removal`` is awaited with a workload that is about to lose workers.
    """

    def __init__(
        self,
        workloads: Workloads,
        intents: IntentMap,
        budget: Budget,
        before_removal: Callable[[Workload], Awaitable[None]],
    ) -> None:
        self._workloads = workloads
        self._intents = intents
        self._budget = budget
        self._before_removal = before_removal
        self._wake = asyncio.Event()
        self._logged = ""

    def wake(self) -> None:
        """Make the next pass at once."""
        self._wake.set()

    async def run(self) -> None:
        """Carry out decision after decision, until cancelled."""
        while True:
            self._wake.clear()
            is_done = False
            try:
                is_done = await self.reconcile_once()
                self._logged = "" if is_done else self._logged
            except DynaplanError as error:
                self._log_once(f"waiting to carry the decision out: {error.args[0]}")
            except Exception:
                log.exception("the decision is not carried out yet: this pass failed")
            try:
                async with asyncio.timeout(EXECUTOR_IDLE_POLL_S if is_done else EXECUTOR_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def reconcile_once(self) -> bool:
        """Make the next steps; tell whether nothing is left to do."""
        intent = await self._intents.read()
        if not intent.is_open:
            return True
        view = await self._workloads.read()
        left = await self._steps(intent.unfinished, view)
        if left != intent.unfinished:
            await self._write(replace(intent, unfinished=left))
            return False
        if left or not all(each.is_settled for each in view.workloads):
            return False
        counts = replace(intent.counts, scaled_decision_id=intent.counts.decision_id)
        await self._write(replace(intent, counts=counts))
        log.info("decision %d is carried out", counts.decision_id)
        return True

    async def _write(self, intent: Intent) -> None:
        try:
            await self._intents.write(intent)
        except ClusterConflict:
            log.debug("another decision was written meanwhile: it comes next")

    async def _steps(self, unfinished: Mapping[Role, Change], view: WorkloadView) -> dict[Role, Change]:
        """Make the steps that are possible now, removals first; return the changes that are left."""
        left = dict(unfinished)
        held = self._budget.held(view)
        for role in sorted(unfinished, key=lambda each: unfinished[each].after - unfinished[each].before):
            change, workload = unfinished[role], view.of(role)
            if workload is None or not change.includes(workload.replicas):
                there = (
                    "is gone" if workload is None else f"is asked for {workload.replicas} by somebody else"
                )
                log.warning("%s %s: it is left as it is", role.value, there)
                del left[role]
                continue
            affordable = self._affordable(workload, change.after, held)
            if affordable != workload.replicas:
                await self._scale(workload, affordable)
                held += max(0, affordable - workload.replicas) * self._budget.gpus_of(workload)
            if affordable == change.after:
                del left[role]
        return left

    async def _scale(self, workload: Workload, replicas: int) -> None:
        if replicas < workload.replicas:
            await self._before_removal(workload)
        await self._workloads.scale(workload, replicas)
        log.info("%s: %d workers asked for instead of %d", workload.name, replicas, workload.replicas)

    def _affordable(self, workload: Workload, wanted: int, held: float) -> int:
        """Return the number of workers that may be asked for while that many GPUs are held."""
        gpus, now = self._budget.gpus_of(workload), workload.replicas
        if wanted <= now or not gpus:
            return wanted
        free = max(0, int((self._budget.gpus - held) // gpus))
        if free < wanted - now:
            self._log_once(
                f"{workload.name}: {wanted - now - free} workers wait for GPUs: {held:g} of the"
                f" {self._budget.gpus:g} of max-gpu-budget are held"
            )
        return min(wanted, now + free)

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            log.info("%s", text)
        self._logged = text
