"""One pass over many models, ``step``: what holds for any fleet, memory and demand, pass after pass."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.contract.gpus import Gpu, GpuUse
from dynaplan.contract.model_keys import ModelDemand, ModelOrder, ModelOrders
from dynaplan.graph.lifecycle import COUNTS, Role, Worker, WorkerState
from dynaplan.models.deployed import DeployedModels
from dynaplan.models.desired import DesiredModels
from dynaplan.models.model import ModelPolicies, ModelPolicy
from dynaplan.models.reports import reports
from dynaplan.models.step import FleetObservation, ModelsState, after_saying, step
from dynaplan.models.workers import Moment

UNIX_S = 1e9
GPU_BYTES = 100 * 2**30
NAMES = "abc"


@st.composite
def deployments(draw: st.DrawFn) -> DeployedModels:
    models = tuple(ServedModel(name, f"{name}-workers", OnDemandSettings()) for name in NAMES)
    policies = {
        name: ModelPolicy(
            ttl_s=draw(st.sampled_from([5.0, 0.0])),
            is_pinned=draw(st.sampled_from([False, False, True])),
            claim_bytes=draw(st.integers(1, 12)) * GPU_BYTES // 10,
            max_workers=draw(st.sampled_from([1, 3])),
            requests_per_worker=1,
        )
        for name in NAMES
    }
    return DeployedModels(models, ModelPolicies(policies))


def demands(now_s: float) -> st.SearchStrategy[dict[str, ModelDemand]]:
    one = st.builds(
        ModelDemand,
        waiting=st.integers(0, 3),
        oldest_unix_s=st.integers(0, int(now_s)).map(lambda at_s: UNIX_S + at_s),
        in_flight=st.integers(0, 3),
        last_use_unix_s=st.just(UNIX_S + now_s),
    )
    return st.dictionaries(st.sampled_from(NAMES), one)


def orders() -> st.SearchStrategy[ModelOrders]:
    pinned = st.dictionaries(st.sampled_from(NAMES), st.booleans())
    return pinned.map(
        lambda wishes: ModelOrders({name: ModelOrder(is_pinned=wish) for name, wish in wishes.items()})
    )


def observed(fleet: tuple[Worker, ...], now_s: float, data: st.DataObject) -> FleetObservation:
    """What is seen of one GPU, of which only the workers that are ready have taken their memory."""
    held = sum(each.memory_bytes for each in fleet if each.state is WorkerState.READY)
    gpus = [(Gpu(0, "GPU-0", memory_bytes=GPU_BYTES), GpuUse(held), "")]
    moment = Moment(now_s, UNIX_S + now_s)
    asked = data.draw(orders())
    return FleetObservation(moment, fleet, gpus, demand=data.draw(demands(now_s)), orders=asked)


def carried_out(
    fleet: tuple[Worker, ...], desired: DesiredModels, now_s: float, data: st.DataObject
) -> tuple[Worker, ...]:
    """The fleet as it obeys: those that leave drain and go at some time, those that start are ready then."""
    after = []
    for each in fleet:
        moves = {WorkerState.STARTING: WorkerState.READY, WorkerState.DRAINING: None}
        if each.name in desired.leaving:
            after.append(replace(each, state=WorkerState.DRAINING, since_s=now_s))
        elif each.state not in moves or data.draw(st.booleans()):
            after.append(each)
        elif (state := moves[each.state]) is not None:
            after.append(replace(each, state=state, since_s=now_s))
    for component, place in desired.placements.items():
        own = {each.index for each in after if each.component == component}
        number = next(index for index in range(len(own) + 1) if index not in own)
        name = f"ns_{component}_{number}" if number else f"ns_{component}"
        started = Worker(name, component, Role.DECODE, since_s=now_s, gpus=place.gpus)
        after.append(replace(started, memory_bytes=place.bytes_each))
    return tuple(after)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_gpu_is_given_out_twice_and_every_pass_can_be_repeated(data: st.DataObject) -> None:
    deployed, state, fleet = data.draw(deployments()), ModelsState(), tuple[Worker, ...]()
    for now_s in range(10, 40, 3):
        seen = observed(fleet, now_s, data)
        before = deepcopy((state, seen))
        after, desired = step(deployed, state, seen)
        assert (after, desired) == step(deployed, *before), (
            "the same again, and nothing that it was given changed"
        )
        assert step(deployed, after, seen)[1] == desired, "seen twice is decided alike"
        assert reports(deployed, after).keys() == set(NAMES)
        state = after_saying(after)
        assert after_saying(state) == state, "what was said is not said again"
        for each in deployed.models:
            present = sum(w.component == each.component and w.state in COUNTS for w in fleet)
            starts = each.component in desired.placements
            leaves = sum(w.component == each.component and w.name in desired.leaving for w in fleet)
            assert desired.workers[each.component] == present + starts - leaves
        fleet = carried_out(fleet, desired, now_s, data)
        assert sum(each.memory_bytes for each in fleet) <= GPU_BYTES


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whoever_begins_anew_with_what_was_learnt_begins_no_load_twice(data: st.DataObject) -> None:
    deployed, state, fleet = data.draw(deployments()), ModelsState(), tuple[Worker, ...]()
    for now_s in range(10, 30, 3):
        state, desired = step(deployed, state, observed(fleet, now_s, data))
        fleet = carried_out(fleet, desired, now_s, data)
    seen = observed(fleet, 30, data)
    _, desired = step(deployed, ModelsState(learnt=state.learnt), seen)
    loading = {each.component for each in fleet if each.state is WorkerState.STARTING}
    policies = {each.component: deployed.policies.models[each.name] for each in deployed.models}
    for component in loading & desired.placements.keys():
        assert policies[component].max_workers > 1
    given_out = sum(each.memory_bytes for each in fleet)
    assert given_out + sum(each.bytes_each for each in desired.placements.values()) <= GPU_BYTES


@given(st.data())
def test_while_the_demand_is_not_known_every_model_stays(data: st.DataObject) -> None:
    deployed = data.draw(deployments())
    fleet = (Worker("ns_a", "a-workers", Role.DECODE, WorkerState.READY, gpus=(0,), memory_bytes=GPU_BYTES),)
    seen = replace(observed(fleet, 10_000, data), demand=None)
    state, desired = step(deployed, ModelsState(), seen)
    assert state.last.plan.actions == ()
    assert (desired.workers["a-workers"], desired.leaving, desired.placements) == (1, {}, {})
