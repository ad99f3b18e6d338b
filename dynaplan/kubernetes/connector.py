"""The connector for a cluster: decisions become numbers of replicas.

A decision is written down first, in one ConfigMap under optimistic locking (``intent.py``), and carried out
in the background (``executor.py``). Numbers that somebody else sets meanwhile, such as
``kubectl scale``, are the numbers asked for from then on: the last writer is right.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.holds import RoleHolds
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import KubernetesClient
from dynaplan.kubernetes.executor import Budget, DeletionCosts, Executor
from dynaplan.kubernetes.graph_deployment import GraphDeployment
from dynaplan.kubernetes.intent import Change, Intent, IntentMap
from dynaplan.kubernetes.labelled_workloads import LabelledWorkloads
from dynaplan.kubernetes.workloads import Workload, Workloads, WorkloadView
from dynaplan.planner.deployment import (
    DeployedComponents,
    ScaledComponent,
    SubComponentNotFoundError,
    missing_workers,
)
from dynaplan.planner.model import Decision
from dynaplan.planner.virtual.connector import refuse_when_changed
from dynaplan.util.connection import Closable
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import CapacityError, ClusterConflict, TemporaryError

log = logging.getLogger(__name__)


async def _ignore(workload: Workload) -> None:
    """Do nothing before a removal: the controller picks any pod."""


class KubernetesConnector:
    """Scales workloads of a cluster; see ``dynaplan.planner.ports.Connector``.

    ``close`` ends the background work and the ``client``. Methods raise ClusterUnavailable while the API
    server is away, ClusterForbidden and PlannerError for what a user has to mend. Unless it ``acts``, nothing
    is carried out, not even what an earlier planner began.
    """

    def __init__(
        self,
        workloads: Workloads,
        intents: IntentMap,
        budget: Budget,
        *,
        before_removal: Callable[[Workload], Awaitable[None]] = _ignore,
        client: Closable | None = None,
        unix_time_s: Callable[[], float] = time.time,
        acts: bool = True,
    ) -> None:
        self._workloads = workloads
        self._intents = intents
        self._budget = budget
        self._executor = Executor(workloads, intents, budget, before_removal)
        self._client = client
        self._unix_time_s = unix_time_s
        self._task: asyncio.Task[None] | None = None
        self._acts = acts
        self._ignored = ""

    async def fleet(self) -> FleetCounts:
        """Return the workers by state; raises TemporaryError while the deployment is not ready.

        While a decision is carried out it need not be ready. What an earlier planner began is carried on.
        """
        view = await self._workloads.read()
        if view.not_ready and not (await self._intents.read()).is_open:
            raise TemporaryError(f"the deployment is not ready: {view.not_ready}")
        self._start_executor()
        return _fleet(view)

    async def desired(self) -> DesiredCounts:
        """Return the replicas asked for, with the changes of the decision that are still to be made."""
        view, intent = await self._workloads.read(), await self._intents.read()
        self._start_executor()
        return _counts(view, intent)

    async def holds(self) -> RoleHolds:
        """The holds in force; a text that cannot be read holds nothing, and is named once."""
        return self._holds(await self._intents.read())

    async def apply(self, decision: Decision) -> int:
        """Write the planner's decision, and have it carried out; return the decision's id.

        Raises TemporaryError when counts or holds have changed since the planner read them, and CapacityError
        for more GPUs than the budget has.
        """
        intent = await self._intents.read()
        view = await self._workloads.read()
        now = _counts(view, intent)
        refuse_when_changed(decision, now, self._holds(intent))
        self._refuse_over_budget(decision.desired, view)
        wanted = {role: decision.desired.of(role) for role in SCALED_ROLES}
        return await self._write_decision(intent, view, {r: n for r, n in wanted.items() if n or view.of(r)})

    async def _write_decision(self, intent: Intent, view: WorkloadView, wanted: Mapping[Role, int]) -> int:
        """Write a decision down, by role, and have it carried out; return its id."""
        changes = {}
        for role, number in wanted.items():
            workload = view.of(role)
            if workload is None:
                raise SubComponentNotFoundError(role.value)
            if workload.replicas != number:
                changes[role] = Change(workload.replicas, number)
        counts = replace(
            intent.counts,
            num_prefill_workers=wanted.get(Role.PREFILL, -1),
            num_decode_workers=wanted.get(Role.DECODE, -1),
            decision_id=intent.counts.next_decision_id,
        )
        try:
            await self._intents.write(replace(intent, counts=counts, unfinished=changes))
        except ClusterConflict as error:
            raise TemporaryError("the desired counts are being changed by somebody else") from error
        self._start_executor()
        self._executor.wake()
        return counts.decision_id

    async def components(self) -> DeployedComponents:
        """The workloads, with the models that their command lines or their status name."""
        view, intent = await self._workloads.read(), await self._intents.read()
        found = tuple(
            ScaledComponent(each.role, each.name, (each.model,) if each.model else ())
            for each in view.workloads
        )
        missing = missing_workers(_fleet(view), _counts(view, intent))
        return DeployedComponents(found, view.not_ready or missing)

    async def close(self) -> None:
        """End the background work; what is unfinished is finished by the next planner."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._client:
            await self._client.close()

    def _start_executor(self) -> None:
        if self._task is None and self._acts:
            self._task = asyncio.create_task(self._executor.run(), name="carrying out decisions")

    def _refuse_over_budget(self, desired: PoolSizes, view: WorkloadView) -> None:
        """Raise CapacityError for more GPUs than the budget has, unless more are asked for now."""
        gpus = {each.role: self._budget.gpus_of(each) for each in view.workloads}
        wanted = sum(desired.of(role) * each for role, each in gpus.items())
        now = sum(each.replicas * gpus[each.role] for each in view.workloads)
        if wanted > self._budget.gpus and wanted > now:
            raise CapacityError(
                f"{desired} would hold {wanted:g} GPUs",
                hint=f"max-gpu-budget allows {self._budget.gpus:g}.",
            )

    def _holds(self, intent: Intent) -> RoleHolds:
        try:
            return RoleHolds.from_text(intent.holds).in_force(self._unix_time_s(), wall_clock)
        except ValueError as error:
            if intent.holds != self._ignored:
                log.warning("ignoring the holds in the ConfigMap %s: %s", self._intents.name, error)
            self._ignored = intent.holds
            return RoleHolds()


GRAPH_DEPLOYMENT_VARIABLE = "DYN_PARENT_DGD_K8S_NAME"
"""The environment variable that names the DynamoGraphDeployment of a planner; Dynamo's operator sets it."""


def connect_cluster(
    settings: PlannerSettings,
    loads: Callable[[], Mapping[str, WorkerLoad]],
    environ: Mapping[str, str] = os.environ,
) -> KubernetesConnector:
    """Return the connector for a cluster, of the DynamoGraphDeployment that the environment names, if any.

    ``loads`` gives the newest loads of workers by the address of their pod. Raises ConfigError without
    a client library or credentials.
    """
    client = KubernetesClient.from_environment(environ)
    gpus = {Role.PREFILL: settings.prefill_engine_num_gpu, Role.DECODE: settings.decode_engine_num_gpu}
    names = {Role.PREFILL: [settings.prefill_component], Role.DECODE: [settings.decode_component]}
    if name := environ.get(GRAPH_DEPLOYMENT_VARIABLE):
        workloads: Workloads = GraphDeployment(client, name, names)
    else:
        workloads = LabelledWorkloads(client, settings.namespace)
    return KubernetesConnector(
        workloads,
        IntentMap(client, settings.namespace),
        Budget(settings.max_gpu_budget, gpus),
        before_removal=DeletionCosts(client, loads).mark,
        client=client,
        acts=not settings.no_operation,
    )


def _fleet(view: WorkloadView) -> FleetCounts:
    counts: Mapping[Role, WorkerCounts] = {each.role: each.counts() for each in view.workloads}
    return FleetCounts(counts.get(Role.PREFILL, WorkerCounts()), counts.get(Role.DECODE, WorkerCounts()))


def _counts(view: WorkloadView, intent: Intent) -> DesiredCounts:
    """Return the replicas of the workloads, with the changes that are still to be made."""
    asked = {each.role: each.replicas for each in view.workloads}
    for role, change in intent.unfinished.items():
        if role in asked and change.includes(asked[role]):
            asked[role] = change.after
    prefill, decode = (asked.get(role, -1) for role in SCALED_ROLES)
    return replace(intent.counts, num_prefill_workers=prefill, num_decode_workers=decode)
