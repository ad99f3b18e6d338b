"""Marks pods by what their workers hold, so that a Deployment's controller removes the idlest first.

``controller.kubernetes.io/pod-deletion-cost`` is an annotation that the ReplicaSet controller compares before
it removes pods of one state (Kubernetes 1.22 and later). It is set just before workers are removed, and not
otherwise: its documentation asks for few writes. A StatefulSet and a LeaderWorkerSet remove the highest
number, whatever it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.planner.kubernetes.workloads import Workload, field, is_leaving
from dynaplan.store.kubernetes_client import PODS, KubernetesClient
from dynaplan.util.errors import DynaplanError

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"


class DeletionCosts:
    """Writes the costs; ``loads`` gives the newest load of each worker by its host, a pod's address."""

    def __init__(self, client: KubernetesClient, loads: Callable[[], Mapping[str, WorkerLoad]]) -> None:
        self._client = client
        self._loads = loads

    async def mark(self, workload: Workload) -> None:
        """Write the cost of each pod of a Deployment whose load is known; never raises a DynaplanError."""
        if not workload.has_costs:
            return
        loads = self._loads()
        for pod in workload.pods:
            load = loads.get(str(field(pod, "status", "podIP")))
            cost = str(deletion_cost(load)) if load else ""
            if not cost or is_leaving(pod) or field(pod, "metadata", "annotations", ANNOTATION) == cost:
                continue
            try:
                name = pod["metadata"]["name"]
                await self._client.patch(PODS, name, {"metadata": {"annotations": {ANNOTATION: cost}}})
            except DynaplanError as error:
                log.warning("any pod of %s may be removed, busy or not: %s", workload.name, error.args[0])
                return


def deletion_cost(load: WorkerLoad) -> int:
    """Return what is lost with a worker: its requests, and of two with the same number its KV entries."""
    requests = load.running_requests + load.waiting_requests
    return 1000 * requests + round(999 * min(1.0, max(0.0, load.kv_usage)))
