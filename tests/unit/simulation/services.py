"""Small simulated services with round numbers: 1 ms per prompt token, 10 ms per decode step."""

from collections.abc import Iterable

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.outcome import Distribution, Slo
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.simulated_service import UNLIMITED_QUEUE, ServiceSettings

TIMING = StepTiming(lambda tokens: float(tokens), lambda decodes, kv_tokens: 10.0)
ENGINE = EngineSettings(total_blocks=1000, block_tokens=16, batched_tokens=1024)


def service(
    *, is_disaggregated: bool = False, gpus: int = 4, startup_s: float = 30.0, router: str = "round-robin"
) -> ServiceSettings:
    """A deployment of that shape; every prompt of a disaggregated one is computed remotely."""
    roles = (Role.DECODE, Role.PREFILL) if is_disaggregated else (Role.DECODE,)
    return ServiceSettings(
        engines=dict.fromkeys(roles, (ENGINE, TIMING)),
        gpus=gpus,
        gpus_per_worker=dict.fromkeys(roles, 1),
        startup_s=dict.fromkeys(roles, startup_s),
        routing=SimulatedRouting(router),
        disaggregation=DisaggregationSettings(is_on=is_disaggregated, max_prefill_queue_size=UNLIMITED_QUEUE),
        slo=Slo(500, 50),
    )


def every(
    seconds: float, count: int, prompt_tokens: int = 100, output_tokens: int = 11
) -> list[TracedRequest]:
    """So many equal requests, one each time so many seconds have passed."""
    return [TracedRequest(index * seconds, prompt_tokens, output_tokens) for index in range(count)]


def mean(spread: Distribution) -> float:
    """The mean of the values of a distribution."""
    return spread.total / spread.count


def workers(prefill: int = 0, decode: int = 1) -> PoolSizes:
    """How many workers of each role."""
    return PoolSizes(prefill, decode)


def at_once(requests: Iterable[tuple[int, int]]) -> list[TracedRequest]:
    """Requests (prompt and output tokens) that all arrive at the beginning."""
    return [TracedRequest(0.0, prompt, output) for prompt, output in requests]
