"""How far the sizing model is off: predicted over simulated, on engine models in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.config.settings.worker import SimOptions
from dynaplan.contract.counts import PoolSizes
from dynaplan.engines.sim.profiles import timing_for
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from tests.bench.table import Row
from tests.unit.planner.sizing.engine_pools import (
    Arrival,
    Shape,
    arrivals,
    decode_times_ms,
    demand_of,
    percentile,
    prefill_times_ms,
)

PROFILES = ("h200_sxm-Llama-3.1-8B-Instruct-FP8", "h100-bf16")
SHAPES = (Shape(), Shape(3000, 0.3, 150, 0.3), Shape(3000, 1.0, 500, 1.0))
WORKERS = (1, 3)
PROMISE = SlaTargets()
PLENTY = 50
LOADS = (0.3, 0.5, 0.7, 0.85)
REQUESTS = 5000


def rows(_: int) -> Iterator[Row]:
    """One row for each percentile; 1 is exact, below 1 is optimistic."""
    ratios: dict[str, list[float]] = {"prefill": [], "ITL": [], "aggregated ITL": [], "aggregated TTFT": []}
    for profile in PROFILES:
        options = SimOptions(profile=profile, block_tokens=64)
        timing, kv_tokens = timing_for(options)
        kind = WorkerKind(timing, EngineSettings.of(options, kv_tokens))
        for shape in SHAPES:
            for workers in WORKERS:
                for load in LOADS:
                    _compare(kind, shape, workers, load, ratios)
    for name, values in ratios.items():
        yield Row(f"95th percentile, {name}: predicted over simulated", "x", values)


def _compare(
    kind: WorkerKind, shape: Shape, workers: int, load: float, ratios: dict[str, list[float]]
) -> None:
    """Each kind of pool at that part of the load that it could carry."""
    service = QueueingModel(kind, kind)
    requests, state = _loaded(service, shape, workers, load)
    predicted = state.predict(PoolSizes(PLENTY, workers), PROMISE)
    _, itls_ms = decode_times_ms(kind, workers, requests, is_remote=True)
    ratios["ITL"].append(predicted.itl_ms / percentile(itls_ms, 95))

    requests, state = _loaded(QueueingModel(kind), shape, workers, load)
    predicted = state.predict(PoolSizes(0, workers), PROMISE)
    ttfts_ms, itls_ms = decode_times_ms(kind, workers, requests, is_remote=False)
    ratios["aggregated ITL"].append(predicted.itl_ms / percentile(itls_ms, 95))
    ratios["aggregated TTFT"].append(predicted.ttft_ms / percentile(ttfts_ms, 95))

    requests = arrivals(shape, 1.0, REQUESTS)
    rate = load / SteadyState(service, demand_of(requests, 1.0)).prefill_waiting(workers).utilisation
    requests = arrivals(shape, rate, REQUESTS)
    simulated_ms = percentile(prefill_times_ms(kind, workers, requests), 95)
    queue = SteadyState(service, demand_of(requests, rate)).prefill_waiting(workers)
    times_ms = (simulated_ms * step / 100 for step in range(20, 400))
    ratios["prefill"].append(
        next(each for each in times_ms if queue.chance_over(each) <= 0.05) / simulated_ms
    )


def _loaded(
    service: QueueingModel, shape: Shape, workers: int, load: float
) -> tuple[Sequence[Arrival], SteadyState]:
    """The requests at that part of the highest rate the model holds for bearable, and their state."""
    demand = demand_of(arrivals(shape, 1.0, REQUESTS), 1.0)
    low, high = 0.0, 1000.0 * workers
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        if SteadyState(service, demand.scaled(middle)).decode_batch(workers).overload:
            high = middle
        else:
            low = middle
    requests = arrivals(shape, load * low, REQUESTS)
    return requests, SteadyState(service, demand_of(requests, load * low))
