"""The connector of Dynamo's planners, over any system that carries decisions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dynaplan.contract.counts import PoolSizes
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.deployment import EmptyTargetReplicasError, TargetReplica, check_deployment
from dynaplan.planner.model import Decision, DecisionStep, Observation
from dynaplan.planner.rules.decision import current_targets
from dynaplan.planner.timing import DECISION_DEADLINE_S, DECISION_POLL_S
from dynaplan.util.errors import DeadlineExceeded, StoreUnavailable, TemporaryError, UserError

if TYPE_CHECKING:
    from dynaplan.planner.ports import Connector
    from dynaplan.util.clock import Clock

MAX_ATTEMPTS = 5
"""Times that a number is written again when somebody else changed the desired counts meanwhile."""


class ComponentConnector:
    """Scales components, one by one or together, with the methods of Dynamo's planners.

    ``model_name`` is the model that the user says is served. What is asked for here is a decision like
    a planner's: it has a number, counts from the call on, and the last writer is right; a ``blocking`` call
    returns when it is carried out.

    Methods raise StoreUnavailable or ClusterUnavailable when the system cannot be reached, DeadlineExceeded
    when they waited in vain, and a PlannerError for a deployment that cannot be planned for.
    """

    def __init__(
        self,
        connector: Connector,
        clock: Clock,
        model_name: str | None = None,
        *,
        deadline_s: float = DECISION_DEADLINE_S,
        poll_s: float = DECISION_POLL_S,
    ) -> None:
        self._connector = connector
        self._clock = clock
        self._model_name = model_name
        self._deadline_s = deadline_s
        self._poll_s = poll_s

    async def add_component(self, role: Role, blocking: bool = True) -> None:
        """Ask for one worker more of the role."""
        await self._ask(lambda current: current.plus(role, 1), blocking)

    async def remove_component(self, role: Role, blocking: bool = True) -> None:
        """Ask for one worker fewer of the role; of none it removes none."""
        await self._ask(lambda current: current.plus(role, -1 if current.of(role) else 0), blocking)

    async def set_component_replicas(self, targets: Sequence[TargetReplica], blocking: bool = True) -> None:
        """Ask for these numbers of workers, in one decision; ``blocking`` waits until it is carried out.

        Raises EmptyTargetReplicasError without any, UserError for a number below 0.
        """
        if not targets:
            raise EmptyTargetReplicasError
        for target in targets:
            if target.desired_replicas < 0:
                raise UserError(
                    f"{target.desired_replicas} {target.sub_component_type.value} workers are below 0"
                )

        def wanted(current: PoolSizes) -> PoolSizes:
            for target in targets:
                role = target.sub_component_type
                current = current.plus(role, target.desired_replicas - current.of(role))
            return current

        await self._ask(wanted, blocking)

    async def validate_deployment(
        self,
        prefill_component_name: str | None = None,
        decode_component_name: str | None = None,
        require_prefill: bool = True,
        require_decode: bool = True,
    ) -> None:
        """Raise DeploymentValidationError unless there is one component of each role, for one model."""
        names = {Role.PREFILL: prefill_component_name} if require_prefill else {}
        names |= {Role.DECODE: decode_component_name} if require_decode else {}
        check_deployment(await self._connector.components(), names, self._model_name)

    async def wait_for_deployment_ready(self) -> None:
        """Wait until all workers that are asked for are ready."""
        ends_s = self._clock.now_s() + self._deadline_s
        while missing := await self._missing():
            await self._pause(ends_s, f"the deployment is not ready: {missing}")

    async def _missing(self) -> str:
        try:
            return (await self._connector.components()).missing
        except TemporaryError as error:
            return str(error)

    async def _ask(self, wanted: Callable[[PoolSizes], PoolSizes], blocking: bool) -> None:
        """Ask for the numbers that ``wanted`` makes of those asked for now, anew when these change meanwhile.

        Raises StoreUnavailable, or what the connector refused at the last attempt.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            current = await self._current()
            desired = wanted(current)
            if desired == current:
                return
            step = DecisionStep("asked for", current, desired, "a program asked for it")
            try:
                identifier = await self._connector.apply(Decision(current, desired, (step,)))
                break
            except StoreUnavailable:
                raise
            except TemporaryError as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                await self._clock.sleep(error.delay_s)
        if blocking:
            await self._wait_carried_out(identifier)

    async def _current(self) -> PoolSizes:
        """Return the numbers asked for; of a role for which none is, the workers there are."""
        fleet, desired = await self._connector.fleet(), await self._connector.desired()
        return current_targets(Observation(self._clock.now_s(), fleet, desired))

    async def _wait_carried_out(self, identifier: int) -> None:
        """Wait until the decision is acknowledged, or another one took its place."""
        ends_s = self._clock.now_s() + self._deadline_s
        while True:
            try:
                desired = await self._connector.desired()
                if not desired.is_pending or desired.decision_id != identifier:
                    return
            except TemporaryError:
                pass
            await self._pause(ends_s, f"decision {identifier} is not carried out")

    async def _pause(self, ends_s: float, missing: str) -> None:
        if self._clock.now_s() >= ends_s:
            raise DeadlineExceeded(f"{missing}, after {self._deadline_s:.0f} s")
        await self._clock.sleep(self._poll_s)
