"""Prefill workers on any box, whatever is asked for and dies: placed where they fit, never left alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.config.settings.models import prefill_pool_name
from dynaplan.models.model import (
    Device,
    Load,
    ModelPolicies,
    ModelPolicy,
    ModelsObservation,
    ModelState,
    ModelStatus,
    Plan,
    Unload,
)
from dynaplan.models.rules.memory import has_room, need
from dynaplan.models.rules.planning import plan
from dynaplan.models.rules.replicas import as_replica, replica_name, wanted_workers

NAMES = "abc"
ORDER = (ModelState.READY, ModelState.LOADING, ModelState.FAILED, ModelState.DRAINING)

ROUNDS = 12
SETTLING_ROUNDS = 60
"""More than what any box here needs to come to rest once nobody asks for anything any more."""


@dataclass(eq=False)
class Running:
    """One worker: what it is of, and what it holds."""

    model: str
    is_prefill: bool
    devices: tuple[int, ...]
    size: int
    since_s: float
    state: ModelState = ModelState.LOADING


@dataclass
class Rounds:
    """A box in rounds of a second, as the fleet plugin has it: the first of a pool's workers is the one that
    stays longest."""

    devices: tuple[Device, ...]
    policies: dict[str, ModelPolicy]
    now_s: float = 1000.0
    workers: list[Running] = field(default_factory=list)
    waiting: dict[str, float] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)

    def pool(self, model: str, is_prefill: bool) -> list[Running]:
        own = [each for each in self.workers if (each.model, each.is_prefill) == (model, is_prefill)]
        return sorted(own, key=lambda each: ORDER.index(each.state))

    def policy(self, model: str, is_prefill: bool) -> ModelPolicy:
        own = self.policies[model]
        return own.prefill or own if is_prefill else own

    def statuses(self) -> dict[str, tuple[ModelStatus, Running | None]]:
        found: dict[str, tuple[ModelStatus, Running | None]] = {}
        for model in self.policies:
            decode = self.pool(model, False)
            first = replace(
                self._status(model, decode[0] if decode else None),
                in_flight=self.in_flight.get(model, 0),
                waiting=int(model in self.waiting),
                oldest_arrival_s=self.waiting.get(model, inf),
                last_use_s=self.used_s.get(model, 0.0),
            )
            found[model] = first, decode[0] if decode else None
            for is_prefill in (False, True):
                begin, name = (1, prefill_pool_name(model)) if is_prefill else (2, model)
                requests = first.in_flight + first.waiting
                wanted = wanted_workers(self.policy(model, is_prefill), requests)
                for number, worker in enumerate(self.pool(model, is_prefill)[begin - 1 :], begin):
                    own = replica_name(name, number)
                    status = replace(self._status(own, worker), last_use_s=self.now_s)
                    found[own] = as_replica(status, own, first, number <= wanted, is_prefill), worker
        return found

    def _status(self, name: str, worker: Running | None) -> ModelStatus:
        if worker is None:
            return ModelStatus(name)
        placed = () if worker.state is ModelState.FAILED else worker.devices
        return ModelStatus(name, worker.state, since_s=worker.since_s, placed_on=placed)

    def act(self) -> Plan:
        """Plan, carry it out, and check that nothing is given twice."""
        seen = self.statuses()
        observation = ModelsObservation(tuple(status for status, _ in seen.values()), self.devices)
        planned = plan(observation, ModelPolicies(self.policies), self.now_s)
        for action in planned.actions:
            worker = seen[action.model][1] if action.model in seen else None
            if isinstance(action, Load):
                self.workers.remove(worker) if worker else None
                model = next(each for each in self.policies if action.model.partition(" ")[0] == each)
                is_prefill = action.model.startswith(prefill_pool_name(model))
                made = Running(model, is_prefill, action.devices, action.bytes_each, self.now_s)
                self.workers.append(made)
            elif isinstance(action, Unload):
                assert worker is not None
                worker.state, worker.since_s = ModelState.DRAINING, self.now_s
        for device in self.devices:
            assert self.held(device.index) <= device.total_bytes
        return planned

    def held(self, index: int) -> int:
        return sum(
            each.size
            for each in self.workers
            if index in each.devices and each.state is not ModelState.FAILED
        )

    def pass_time(self) -> None:
        """What drains is gone, and what loads is ready a round later; a model that is ready has answered."""
        self.workers = [each for each in self.workers if each.state is not ModelState.DRAINING]
        for worker in self.workers:
            if worker.state is ModelState.LOADING and worker.since_s < self.now_s:
                worker.state, worker.since_s = ModelState.READY, self.now_s
                if not worker.is_prefill and worker.model in self.waiting:
                    del self.waiting[worker.model]
                    self.used_s[worker.model] = self.now_s
        for model in self.waiting.keys() & {each.model for each in self.workers if not each.is_prefill}:
            if any(each.state is ModelState.READY for each in self.pool(model, False)):
                del self.waiting[model]
        for model in self.policies:
            if not any(each.state is ModelState.READY for each in self.pool(model, False)):
                self.in_flight[model] = 0
        self.now_s += 1


@st.composite
def boxes(draw: st.DrawFn) -> Rounds:
    devices = tuple(Device(i, draw(st.integers(4, 12))) for i in range(draw(st.integers(1, 3))))
    most = max(each.total_bytes for each in devices)

    def policy(**more: object) -> ModelPolicy:
        return ModelPolicy(
            ttl_s=0.0,
            load_timeout_s=1e9,
            claim_bytes=draw(st.integers(1, most)),
            estimate_load_s=2.0,
            max_workers=draw(st.sampled_from([1, 1, 3])),
            requests_per_worker=draw(st.integers(1, 3)),
            priority=draw(st.sampled_from([0.5, 1.0, 3.0])),
            **more,  # type: ignore[arg-type]
        )

    models = {}
    for name in NAMES[: draw(st.integers(1, 3))]:
        models[name] = policy(prefill=policy() if draw(st.booleans()) else None)
    return Rounds(devices, models)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_asked_for_and_dies_memory_is_given_once_and_no_prefill_worker_is_left_alone(
    data: st.DataObject,
) -> None:
    box = data.draw(boxes())
    for _ in range(ROUNDS):
        for model in data.draw(st.sets(st.sampled_from(sorted(box.policies)))):
            box.waiting.setdefault(model, box.now_s)
        for model in box.policies:
            is_ready = any(each.state is ModelState.READY for each in box.pool(model, False))
            box.in_flight[model] = data.draw(st.integers(0, 8)) if is_ready else 0
        if box.workers and data.draw(st.booleans()):
            victim = box.workers[data.draw(st.integers(0, len(box.workers) - 1))]
            if victim.state is not ModelState.DRAINING and data.draw(st.booleans()):
                victim.state, victim.since_s = ModelState.FAILED, box.now_s
            else:
                box.workers.remove(victim)
        box.act()
        box.pass_time()
    settle(box)
    for model, own in box.policies.items():
        decode, prefill = (box.pool(model, is_prefill) for is_prefill in (False, True))
        serving = [each for each in prefill if each.state is not ModelState.FAILED]
        if not [each for each in decode if each.state is not ModelState.FAILED]:
            assert serving == [], "a prefill worker was left alone"
        elif own.prefill and not serving:
            wanted = need(own.prefill, ModelStatus(prefill_pool_name(model)), box.devices)
            rooms = [
                each for each in box.devices if box.held(each.index) + wanted.bytes_each <= each.total_bytes
            ]
            assert not [each for each in rooms if has_room(wanted, each, {})], "there was room for one"


def settle(box: Rounds) -> None:
    """Let the box come to rest while nobody asks for another model, and what is answered goes on being
    answered; it does, or workers take each other's place for ever."""
    quiet = 0
    for _ in range(SETTLING_ROUNDS):
        planned = box.act()
        quiet = 0 if [each for each in planned.actions if isinstance(each, Load | Unload)] else quiet + 1
        box.pass_time()
        if quiet == 4:
            return
    raise AssertionError(f"it does not come to rest: {planned.actions}")
