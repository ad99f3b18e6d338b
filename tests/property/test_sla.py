"""What holds for every size, whatever the demand, the profile and the limits."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Lengths
from dynaplan.planner.model import Demand, Sizing, WorkerLimits
from dynaplan.planner.sizing.limits import fit_budget
from dynaplan.planner.sizing.look_ahead import size_for_all
from dynaplan.planner.sizing.pool_sizes import size_pools
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from tests.unit.planner.sizing.queueing.test_queueing_model_against_engine import FITTED, H200, kind

counts = st.integers(0, 40)
widths = st.sampled_from([1, 2, 3, 4, 8])
limits_of_all_kinds = st.builds(
    WorkerLimits,
    max_gpus=st.integers(1, 64),
    prefill_gpus=widths,
    decode_gpus=widths,
    least=st.builds(PoolSizes, st.integers(0, 3), st.integers(0, 3)),
)
histograms = st.lists(st.integers(1, 20_000), min_size=1, max_size=5).map(Lengths.of)
kinds = st.sampled_from([kind(H200), kind(FITTED)])
demands = st.builds(
    Demand,
    st.floats(0, 500),
    histograms,
    histograms,
    prefix_hit_rate=st.floats(0, 1),
    burstiness=st.floats(0, 10),
)
promises = st.builds(
    SlaTargets, st.floats(1, 5000), st.floats(1, 200), st.floats(1, 99.9), st.floats(1, 99.9)
)


@settings(deadline=None)
@given(st.builds(PoolSizes, counts, counts), limits_of_all_kinds)
def test_the_budget_is_never_exceeded_and_the_minimums_are_kept(
    wanted: PoolSizes, limits: WorkerLimits
) -> None:
    fitted = fit_budget(wanted, limits)
    if fitted is None:
        assert limits.gpus(limits.least) > limits.max_gpus
        return
    assert limits.gpus(fitted) <= limits.max_gpus
    assert fitted.prefill >= limits.least.prefill
    assert fitted.decode >= limits.least.decode
    assert fitted.prefill <= max(wanted.prefill, limits.least.prefill)
    assert fitted.decode <= max(wanted.decode, limits.least.decode)


def test_a_grid_of_budgets_is_kept_and_used_up() -> None:
    """Where one worker more of either kind that is wanted would fit, it is there."""
    for prefill, decode, prefill_gpus, decode_gpus, most, least in product(
        range(1, 8), range(1, 8), (1, 2, 4), (1, 2, 8), (4, 8, 16), (0, 1)
    ):
        wanted = PoolSizes(prefill, decode)
        limits = WorkerLimits(most, prefill_gpus, decode_gpus, PoolSizes(least, least))
        fitted = fit_budget(wanted, limits)
        if fitted is None:
            assert least * (prefill_gpus + decode_gpus) > most
            continue
        rest = most - limits.gpus(fitted)
        assert rest >= 0
        assert fitted.prefill == prefill or rest < prefill_gpus
        assert fitted.decode == decode or rest < decode_gpus


@settings(max_examples=60, deadline=None)
@given(kinds, st.booleans(), demands, promises, limits_of_all_kinds, st.builds(PoolSizes, counts, counts))
def test_any_demand_has_a_size_within_the_limits_and_a_story(
    workers: WorkerKind,
    is_aggregated: bool,
    demand: Demand,
    promise: SlaTargets,
    limits: WorkerLimits,
    current: PoolSizes,
) -> None:
    service = QueueingModel(workers, None if is_aggregated else workers)
    sizing = size_pools(service, demand, promise, limits, current)
    assert sizing.steps
    assert sizing.steps[-1].after == sizing.workers
    assert limits.gpus(sizing.workers) <= limits.max_gpus or sizing.workers == current


@settings(max_examples=30, deadline=None)
@given(kinds, demands, st.floats(1, 4))
def test_more_requests_never_need_fewer_workers(workers: WorkerKind, demand: Demand, factor: float) -> None:
    service, plenty = QueueingModel(workers, workers), WorkerLimits(max_gpus=100_000)
    promise = SlaTargets(1000.0, 30.0)
    few = size_pools(service, demand, promise, plenty, PoolSizes(1, 1)).workers
    many = size_pools(service, demand.scaled(factor), promise, plenty, PoolSizes(1, 1)).workers
    assert many.decode >= few.decode
    # More decode workers make shorter steps, and leave the prefill more of the TTFT.
    assert many.prefill + many.decode >= few.prefill + few.decode


@settings(max_examples=30, deadline=None)
@given(
    kinds,
    st.lists(demands, max_size=2),
    limits_of_all_kinds,
    st.builds(PoolSizes, counts, counts),
)
def test_a_plan_keeps_the_limits_too(
    workers: WorkerKind,
    expected: list[Demand],
    limits: WorkerLimits,
    current: PoolSizes,
) -> None:
    def sized(demand: Demand, bounds: WorkerLimits) -> Sizing:
        return size_pools(QueueingModel(workers, workers), demand, SlaTargets(), bounds, current)

    sizing = size_for_all(sized, expected, current, limits)
    assert limits.gpus(sizing.workers) <= limits.max_gpus or sizing.workers == current
