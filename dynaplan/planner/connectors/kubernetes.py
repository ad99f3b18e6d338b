"""The connector for a cluster: decisions become numbers of replicas.

What is asked for is written down first, whole and guarded (``adapters.kubernetes.intent``), and carried out
by ``adapters.kubernetes.carrying_out`` in the background. Numbers that somebody else sets meanwhile, such as
``kubectl scale``, are the numbers asked for from then on: the last writer is right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dynaplan.fleet.counts import FleetCounts, Targets, WorkerCounts
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.connectors.virtual import refuse_when_changed
from dynaplan.planner.kubernetes.carrying_out import Budget, Executor
from dynaplan.planner.kubernetes.intent import Change, Intent, IntentMap
from dynaplan.planner.kubernetes.workloads import Workload, Workloads, WorkloadView
from dynaplan.planner.model.components import DeployedComponents, ScaledComponent, missing_workers
from dynaplan.planner.model.decisions import Decision
from dynaplan.planner.model.errors import SubComponentNotFoundError
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import CapacityError, ClusterConflict, TemporaryError

if TYPE_CHECKING:
    from dynaplan.planner.ports import CountsChange

log = logging.getLogger(__name__)


async def _nothing(workload: Workload) -> None:
    """Let the controller pick any pod."""


class KubernetesConnector:
    """Scales workloads of a cluster; see ``dynaplan.planner.ports.ClusterConnector``.

    ``close`` ends the background work and calls ``end``. Methods raise ClusterUnavailable while the API
    server is away, ClusterForbidden and PlannerError for what a user has to mend. Unless it ``acts``, nothing
    is carried out, not even what an earlier planner began.
    """

    def __init__(
        self,
        workloads: Workloads,
        intents: IntentMap,
        budget: Budget,
        *,
        before_removal: Callable[[Workload], Awaitable[None]] = _nothing,
        end: Callable[[], Awaitable[None]] | None = None,
        unix_time_s: Callable[[], float] = time.time,
        acts: bool = True,
    ) -> None:
        self._workloads = workloads
        self._intents = intents
        self._budget = budget
        self._executor = Executor(workloads, intents, budget, before_removal)
        self._end = end
        self._unix_time_s = unix_time_s
        self._task: asyncio.Task[None] | None = None
        self._acts = acts
        self._ignored = ""

    async def fleet(self) -> FleetCounts:
        """The workers by state; raises TemporaryError while the deployment is not ready for other reasons.

        A decision that is being carried out is such a reason of our own: planning goes on meanwhile.
        """
        sight = await self._workloads.look()
        if sight.not_ready and not (await self._intents.read()).is_open:
            raise TemporaryError(f"the deployment is not ready: {sight.not_ready}")
        self._begin()
        return _fleet(sight)

    async def desired(self) -> DesiredCounts:
        """The numbers of replicas asked for; of a role that is still to be scaled the decision's."""
        sight, intent = await self._workloads.look(), await self._intents.read()
        self._begin()
        return _counts(sight, intent)

    async def holds(self) -> RoleHolds:
        """The holds in force; a text that cannot be read holds nothing, and is named once."""
        return self._holds(await self._intents.read())

    async def apply(self, decision: Decision) -> int:
        """Write the decision down, over the version of it that was read, and have it carried out."""
        intent = await self._intents.read()
        sight = await self._workloads.look()
        now = _counts(sight, intent)
        refuse_when_changed(decision, now, self._holds(intent))
        self._refuse_over_budget(decision.desired, sight)
        wanted = {role: decision.desired.of(role) for role in SCALED_ROLES}
        return await self._decided(intent, sight, {r: n for r, n in wanted.items() if n or sight.of(r)})

    async def ask(self, change: CountsChange) -> int:
        """Write down what a person asks for, over the version of it that was read, and have it carried out.

        More GPUs than the budget has are not refused: the planner that carries it out keeps to its own.
        """
        intent, sight = await self._intents.read(), await self._workloads.look()
        now, before = _counts(sight, intent), self._holds(intent)
        asked, holds = change(now, before)
        intent = intent if holds == before else replace(intent, holds=holds.to_text())
        if asked:
            every = {each.role: now.of(each.role) for each in sight.workloads}
            return await self._decided(intent, sight, every | dict(asked))
        if holds != before:
            await self._write(intent)
        return now.decision_id

    async def _decided(self, intent: Intent, sight: WorkloadView, wanted: Mapping[Role, int]) -> int:
        """Write a decision down, by role, and have it carried out; return its id."""
        changes = {}
        for role, number in wanted.items():
            workload = sight.of(role)
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
        await self._write(replace(intent, counts=counts, unfinished=changes))
        self._begin()
        self._executor.wake()
        return counts.decision_id

    async def _write(self, intent: Intent) -> None:
        try:
            await self._intents.write(intent)
        except ClusterConflict as error:
            raise TemporaryError("the desired counts are being changed by somebody else") from error

    async def components(self) -> DeployedComponents:
        """The workloads, with the models that their command lines or their status name."""
        sight, intent = await self._workloads.look(), await self._intents.read()
        found = tuple(
            ScaledComponent(each.role, each.name, (each.model,) if each.model else ())
            for each in sight.workloads
        )
        missing = missing_workers(_fleet(sight), _counts(sight, intent))
        return DeployedComponents(found, sight.not_ready or missing)

    async def close(self) -> None:
        """End the background work; what is unfinished is finished by the next planner."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._end:
            await self._end()

    def _begin(self) -> None:
        if self._task is None and self._acts:
            self._task = asyncio.create_task(self._executor.run(), name="carrying out decisions")

    def _refuse_over_budget(self, desired: Targets, sight: WorkloadView) -> None:
        """Raise CapacityError for more GPUs than the budget has, unless more are asked for now."""
        gpus = {each.role: self._budget.gpus_of(each) for each in sight.workloads}
        wanted = sum(desired.of(role) * each for role, each in gpus.items())
        now = sum(each.replicas * gpus[each.role] for each in sight.workloads)
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


def _fleet(sight: WorkloadView) -> FleetCounts:
    counts: Mapping[Role, WorkerCounts] = {each.role: each.counts() for each in sight.workloads}
    return FleetCounts(counts.get(Role.PREFILL, WorkerCounts()), counts.get(Role.DECODE, WorkerCounts()))


def _counts(sight: WorkloadView, intent: Intent) -> DesiredCounts:
    """Return the numbers asked for: of the objects, but for the changes that are still to be made."""
    asked = {each.role: each.replicas for each in sight.workloads}
    for role, change in intent.unfinished.items():
        if role in asked and change.includes(asked[role]):
            asked[role] = change.after
    prefill, decode = (asked.get(role, -1) for role in SCALED_ROLES)
    return replace(intent.counts, num_prefill_workers=prefill, num_decode_workers=decode)
