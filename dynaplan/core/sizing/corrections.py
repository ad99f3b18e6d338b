"""What engines were measured to take, over what their profile says: for the queueing model.

The factors multiply the time of every step. What is compared must be steps, not queues: a backlog makes every
TTFT long, however fast the engines are, and factors that grew with it would ask for ever more workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynaplan.core.sizing.measured_load import measured_demand
from dynaplan.core.sizing.queueing_model import ServiceModel, SteadyState
from dynaplan.domain.planning.sizing import Corrections, SlaTargets
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Demand, Traffic

FEWEST_REQUESTS = 20
"""In an interval; the mean over fewer says too little."""

GAIN = 0.2
"""How far a factor goes, in one interval, towards what was measured; most of the way after ten intervals.

One interval's measurement is off by some per cent, and a size must not follow that.
"""

LEAST, MOST = 0.5, 3.0
"""No factor is effective_correction beyond these: a profile that is further off is that of another engine."""

HALVINGS = 7
"""Of the range between them, to within two per cent."""


@dataclass(frozen=True)
class _Seen:
    """One interval: its traffic, its demand, and the workers that served."""

    traffic: Traffic
    demand: Demand
    serving: Targets

    @property
    def answered_per_ms(self) -> float:
        """Of one decode worker. What was answered, not what arrived: in a backlog these differ."""
        seen = self.traffic.osl
        answered = seen.total if seen and seen.total else self.traffic.requests
        assert answered
        return answered / self.traffic.interval_s / 1000 / self.serving.decode


def corrected(
    service: ServiceModel, before: Corrections, traffic: Traffic, serving: Targets, targets: SlaTargets
) -> tuple[Corrections, str]:
    """The corrections after an interval in which so many workers served, and why.

    They move slowly, and not at all where the comparison would say more about queues than about engines.
    """
    demand = measured_demand(traffic)
    obstacle = _obstacle(service, traffic, demand, serving)
    if obstacle or demand is None:
        return before, f"corrections stay at {_words(before)}: {obstacle}"
    seen = _Seen(traffic, demand, serving)
    decode = _moved(before.decode, _decode_factor(service, seen))
    if service.prefill is None:
        after, note = Corrections(before.prefill, decode), ""
    else:
        prefill, note = _prefill_factor(service.slowed(1.0, decode), seen, before.prefill, targets)
        after = Corrections(_moved(before.prefill, prefill), decode)
    return after, f"measured over expected: {_words(after)}{note}"


def _obstacle(service: ServiceModel, traffic: Traffic, demand: Demand | None, serving: Targets) -> str:
    if traffic.requests is None:
        return traffic.missing or "nothing was measured"
    is_known = demand and traffic.isl_tokens and traffic.osl_tokens
    if traffic.requests < FEWEST_REQUESTS or not is_known:
        return "there were too few requests"
    if not serving.decode or (service.prefill and not serving.prefill):
        return "not every role had workers"
    return ""


def _decode_factor(service: ServiceModel, seen: _Seen) -> float | None:
    """How much longer the steps were than the profile says of the batch that there was.

    By Little's law the batch follows from what was answered and how long that took, both measured: it is the
    right one in a backlog too. None where nothing was decoded.
    """
    itl_ms, state = seen.traffic.itl_ms, SteadyState(service, seen.demand)
    answers, kind = state.answers, service.decode
    if not itl_ms or not answers.mean_steps:
        return None
    rate = seen.answered_per_ms
    batch = min(1 + rate * answers.mean_steps * itl_ms, float(kind.settings.request_slots))
    expected_ms = kind.decode_ms(batch, min(batch * answers.context_tokens, kind.kv_tokens))
    if state.is_aggregated:
        start_ms = max(0.0, state.prompts.fixed_ms - kind.decode_ms(1, 0.0))
        expected_ms += -math.expm1(-rate * itl_ms) * start_ms + itl_ms * rate * state.prompts.mean_ms
    return itl_ms / expected_ms


def _prefill_factor(
    service: ServiceModel, seen: _Seen, before: float, targets: SlaTargets
) -> tuple[float | None, str]:
    """The factor that goes with the TTFT that was measured, nearest to ``before``; and an objection.

    How much of the TTFT was waiting is not known exactly: between none, which makes the most of the factor,
    and what the queueing model expects, which errs on the side of too much. What lies between is no evidence.
    A TTFT over its target comes from a backlog, about which the model says nothing.
    """
    ttft_ms = seen.traffic.ttft_ms
    if not ttft_ms:
        return None, ""
    if ttft_ms > targets.ttft_ms:
        return None, f", prefill stays: a TTFT of {ttft_ms:.0f} ms tells of a backlog, not of engines"
    with_waiting = _explaining(ttft_ms, service, seen.demand, seen.serving)
    alone = _explaining(ttft_ms, service, seen.demand.times(0.0), seen.serving)
    return min(max(before, with_waiting), max(alone, with_waiting)), ""


def _explaining(ttft_ms: float, service: ServiceModel, demand: Demand, serving: Targets) -> float:
    """The factor with which the model expects that mean TTFT."""
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        times = SteadyState(service.slowed(middle, 1.0), demand).mean_times(serving)
        if times and times.mean_ttft_ms < ttft_ms:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _moved(before: float, measured: float | None) -> float:
    if measured is None:
        return before
    ratio: float = (measured / before) ** GAIN
    return min(max(before * ratio, LEAST), MOST)


def _words(corrections: Corrections) -> str:
    return f"prefill {corrections.prefill:.3g}, decode {corrections.decode:.3g}"
