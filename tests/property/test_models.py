"""Many models on one box: what holds for any models, memory and load, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.models.model import Device, ModelPolicy, ModelState, Sleep, SleepLevel, Unload
from dynaplan.models.rules.eviction import choose
from dynaplan.models.rules.memory import Holding, Need, free_bytes, has_room
from dynaplan.models.rules.planning import plan
from dynaplan.models.rules.turns import Leave, deadline_s, max_swap_wait_s, tenure_of
from dynaplan.simulation.many_models.box import FREE_S, Box, SimulatedModel
from dynaplan.simulation.many_models.call_chains import Chain, ChainCall
from dynaplan.simulation.many_models.policies import Dynaplan

NAMES = "abcde"


class CheckedDynaplan(Dynaplan):
    """Our rules, each plan of them checked before and after it is carried out."""

    def act(self, box: Box) -> float:
        next_s = super().act(box)
        for device in box.devices:
            workers = [*box.workers.values(), *box.further.values()]
            held = sum(each.status.held_bytes.get(device.index, 0) for each in workers)
            assert held <= device.total_bytes
        return next_s

    def plan(self, box: Box) -> Any:
        observation = box.observation()
        planned = plan(observation, box.settings, box.now_s)
        statuses = {each.name: each for each in observation.models}
        some_overdue = any(
            deadline_s(box.settings.models[name], each) <= box.now_s
            for name, each in statuses.items()
            if not each.replica_of and each.state not in (ModelState.READY, ModelState.LOADING)
        )
        for action in planned.actions:
            if not isinstance(action, Unload | Sleep) or "makes room" not in action.why:
                continue
            status = statuses[action.model]
            own = box.settings.models[status.replica_of or action.model]
            tenure = tenure_of(own, status, box.now_s)
            assert tenure.leave <= (Leave.FOR_OVERDUE if some_overdue else Leave.AT_ONCE), action
        return planned


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[Device, ...], dict[str, SimulatedModel]]:
    devices = tuple(Device(i, draw(st.integers(4, 12))) for i in range(draw(st.integers(1, 3))))
    most = max(each.total_bytes for each in devices)
    models = {}
    for name in NAMES[: draw(st.integers(1, 5))]:
        size, load_s = draw(st.integers(1, most)), draw(st.integers(1, 20))
        own = ModelPolicy(
            ttl_s=draw(st.sampled_from([0.0, 5.0, 60.0])),
            priority=draw(st.sampled_from([0.5, 1.0, 3.0])),
            min_stay_s=draw(st.sampled_from([0.0, 0.0, 15.0])),
            load_timeout_s=1e9,
            claim_bytes=size,
            estimate_load_s=load_s,
            sleep_levels=draw(st.sampled_from([(), (SleepLevel("1", 0.5, min(1, size)),)])),
            max_workers=draw(st.sampled_from([1, 1, 3])),
            requests_per_worker=draw(st.integers(1, 3)),
        )
        models[name] = SimulatedModel(own, load_s, itl_s=1.0, slots=draw(st.integers(1, 3)))
    return devices, models


def chains(names: str) -> st.SearchStrategy[list[Chain]]:
    calls = st.lists(
        st.builds(
            ChainCall, st.sampled_from(names), st.just(0), st.integers(1, 20), st.sampled_from([0.0, 3.0])
        ),
        min_size=1,
        max_size=4,
    )
    made = st.builds(Chain, st.integers(0, 100).map(float), calls, st.just(1e9))
    return st.lists(made, min_size=1, max_size=12).map(lambda each: sorted(each, key=lambda c: c.begin_s))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_request_starves_none_is_cut_and_nothing_is_placed_where_it_does_not_fit(
    data: st.DataObject,
) -> None:
    devices, models = data.draw(boxes())
    box = Box(devices, models, CheckedDynaplan())
    box.run(data.draw(chains("".join(models))), 200.0)
    assert [each for each in box.requests if not each.end_s < 1e9 or each.refused or each.is_cut] == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_wait_is_bounded_by_the_turns_that_are_ahead(data: st.DataObject) -> None:
    """The bound of ``turns``: after its deadline each of the others is ahead of a request once."""
    names = NAMES[: data.draw(st.integers(2, 4))]
    loads = {name: data.draw(st.integers(1, 20)) for name in names}
    models = {
        name: SimulatedModel(
            ModelPolicy(ttl_s=0.0, claim_bytes=10, estimate_load_s=load_s), load_s, itl_s=1.0, slots=1000
        )
        for name, load_s in loads.items()
    }
    load = data.draw(chains(names))
    box = Box((Device(0, 10),), models, Dynaplan())
    box.run(load, 200.0)
    longest_answer_s = max(each.end_s - each.begun_s for each in box.requests)
    for request in box.requests:
        own = box.workers[request.call.model]
        swap_wait_s = max_swap_wait_s(own.model.settings, own.status)
        a_turn_s = longest_answer_s + FREE_S + max(loads.values())
        assert request.admitted_s - request.arrival_s <= swap_wait_s + len(names) * a_turn_s


EQUAL = SimulatedModel(ModelPolicy(claim_bytes=10, estimate_load_s=10), 10, itl_s=1.0)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("fitting", [1, 2])
def test_a_storm_makes_at_most_one_swap_more_than_the_best_order(number: int, fitting: int) -> None:
    """Every order of six requests, half a second apart. The best order loads each model once.

    The models are alike, so that orders in which they come first as a, b, c are all there are.
    """
    for order in product(NAMES[:number], repeat=6):
        if list(dict.fromkeys(order)) != sorted(set(order)):
            continue
        box = Box((Device(0, 10 * fitting),), dict.fromkeys(NAMES[:number], EQUAL), Dynaplan())
        box.run((Chain(i / 2, (ChainCall(name, 0, 2),), 1e9) for i, name in enumerate(order)), 10.0)
        assert box.loads <= len(set(order)) + 1, order


def test_a_b_a_a_c_a_b_c_loads_each_model_once() -> None:
    models = {
        name: SimulatedModel(ModelPolicy(claim_bytes=10, estimate_load_s=10), 10, itl_s=1.0) for name in "abc"
    }
    box = Box((Device(0, 10),), models, Dynaplan())
    box.run((Chain(float(i), (ChainCall(name, 0, 5),), 1e9) for i, name in enumerate("abaacabc")), 10.0)
    assert box.loads == 3


# Memory faults


class FaultyBox(Box):
    """Models whose estimates are wrong, and whose memory comes back late, or never.

    A load that finds too little memory fails, as an engine's does, and says how much there was.
    """

    def __init__(self, devices: tuple[Device, ...], models: dict[str, SimulatedModel], sizes: dict[str, int]):
        super().__init__(devices, models, Dynaplan())
        self.sizes = sizes
        self.late_s: list[float] = []
        self.too_little: dict[str, list[int]] = {name: [] for name in models}

    def load(self, name: str, devices: tuple[int, ...]) -> None:
        there = min(self._free(index) for index in devices)
        super().load(name, devices)
        worker = self.workers[name]
        if self.sizes[name] <= there:
            worker.status = replace(
                worker.status,
                held_bytes=dict.fromkeys(devices, self.sizes[name]),
                learnt=replace(worker.status.learnt, memory_bytes=self.sizes[name]),
            )
            return
        self.too_little[name].append(there)
        worker.generation += 1
        worker.status = replace(worker.status, held_bytes={})
        self._later(1.0, lambda: self._fail(name, there))

    def _fail(self, name: str, there: int) -> None:
        retry_at_s = self.now_s + 5
        worker = self.workers[name]
        if worker.status.state is ModelState.LOADING:
            learnt = replace(worker.status.learnt, failed_memory_bytes=there)
            self._move(worker, ModelState.FAILED, placed_on=(), learnt=learnt, retry_at_s=retry_at_s)

    def _free(self, index: int) -> int:
        held = sum(each.status.held_bytes.get(index, 0) for each in self.workers.values())
        return self.devices[index].total_bytes - self.devices[index].foreign_bytes - held

    def _move(self, worker: Any, state: ModelState, **changes: Any) -> None:
        held = dict(worker.status.held_bytes)
        super()._move(worker, state, **changes)
        late_s = self.late_s.pop() if state is ModelState.UNLOADED and self.late_s else 0.0
        if late_s:
            self._take(held)
            self._later(late_s, lambda: self._take({index: -size for index, size in held.items()}))

    def _take(self, held: dict[int, int]) -> None:
        self.devices = tuple(
            replace(each, foreign_bytes=each.foreign_bytes + held.get(each.index, 0)) for each in self.devices
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_model_is_placed_twice_where_it_does_not_fit_whatever_memory_does(data: st.DataObject) -> None:
    names = NAMES[: data.draw(st.integers(2, 4))]
    sizes = {name: data.draw(st.integers(2, 12)) for name in names}
    models = {
        name: SimulatedModel(
            ModelPolicy(
                ttl_s=20.0,
                load_timeout_s=300.0,
                estimate_bytes=max(1, round(size * data.draw(st.sampled_from([0.5, 1.0, 1.5])))),
                estimate_load_s=5,
            ),
            5,
            itl_s=1.0,
        )
        for name, size in sizes.items()
    }
    devices = tuple(Device(index, 12) for index in range(data.draw(st.integers(1, 2))))
    box = FaultyBox(devices, models, sizes)
    box.late_s = data.draw(st.lists(st.sampled_from([0.0, 3.0, 40.0, 1e6]), max_size=4))
    box.run(data.draw(chains(names)), 200.0)
    for tried in box.too_little.values():
        assert tried == sorted(set(tried))
    assert [each for each in box.requests if not each.end_s < 1e9] == []


# The evictor beside brute force

holdings = st.lists(st.integers(0, 6), min_size=0, max_size=6).map(
    lambda sizes: {f"m{index}": Holding({0: size}) for index, size in enumerate(sizes)}
)


@settings(max_examples=200, deadline=None)
@given(holdings, st.integers(0, 20), st.data())
def test_on_one_device_as_few_leave_as_can_and_of_those_the_first(
    held: dict[str, Holding], size: int, data: st.DataObject
) -> None:
    candidates = data.draw(st.permutations(sorted(held)).map(lambda all_of: all_of[: len(held) - 1]))
    device, wanted = Device(0, 16), Need("x", size)

    def makes_room(leaving: tuple[str, ...]) -> bool:
        return has_room(wanted, device, {name: each for name, each in held.items() if name not in leaving})

    enough = [
        tuple(candidates[i] for i in ranks)
        for number in range(len(candidates) + 1)
        for ranks in combinations(range(len(candidates)), number)
        if makes_room(tuple(candidates[i] for i in ranks))
    ]
    choice = choose(wanted, [device], held, candidates)
    assert (choice.leaving if choice else None) == (enough[0] if enough else None)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_on_several_devices_a_place_is_found_if_there_is_one_and_nobody_leaves_in_vain(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 3))
    devices = [Device(index, 10) for index in range(count)]
    held = {
        name: Holding(
            dict.fromkeys(
                data.draw(st.sets(st.integers(0, count - 1), min_size=1)), data.draw(st.integers(0, 4))
            ),
            is_exclusive=data.draw(st.sampled_from([False, False, True])),
        )
        for name in NAMES[: data.draw(st.integers(0, 5))]
    }
    wanted = Need(
        "x",
        data.draw(st.integers(0, 10)),
        data.draw(st.integers(1, 3)),
        frozenset(),
        data.draw(st.booleans()),
    )
    candidates = data.draw(st.permutations(sorted(held)).map(lambda each: each[: max(0, len(each) - 1)]))
    choice = choose(wanted, devices, held, candidates)

    def roomy(leaving: tuple[str, ...]) -> set[int]:
        rest = {name: each for name, each in held.items() if name not in leaving}
        return {each.index for each in devices if has_room(wanted, each, rest)}

    is_possible = len(roomy(tuple(candidates))) >= wanted.devices
    assert (choice is not None) == is_possible
    if choice is not None:
        assert len(choice.devices) == wanted.devices
        assert set(choice.devices) <= roomy(choice.leaving)
        for name in choice.leaving:
            assert not set(choice.devices) <= roomy(tuple(each for each in choice.leaving if each != name))


def test_what_is_free_is_never_promised_twice() -> None:
    held = {"a": Holding({0: 6}), "b": Holding({0: 3})}
    assert free_bytes(Device(0, 10), held) == 1
