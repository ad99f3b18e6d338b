"""What engines were measured to take, over what their profile says: for the queueing model."""

from __future__ import annotations

from dynaplan.core.sla.predicting import Deployment, Outlook
from dynaplan.domain.sla import Corrections
from dynaplan.domain.targets import Targets
from dynaplan.domain.traffic import Demand, Traffic

FEWEST_REQUESTS = 20
"""In an interval; the mean over fewer says too little."""

GAIN = 0.2
"""The power of the measured ratio that one interval contributes: most of it is there after ten intervals."""

BUSIEST = 0.7
"""Above that part of its time a pool's waiting hides how fast it computes."""

LEAST, MOST = 0.5, 3.0


def corrected(
    deployment: Deployment, before: Corrections, traffic: Traffic, serving: Targets
) -> tuple[Corrections, str]:
    """The corrections after an interval in which so many workers served, and why.

    Measured means are held against the means that the model, corrected as before, expects of this traffic.
    The factors multiply the time of every step, of prefill and of decode workers. They move slowly, and not
    at all where the comparison would say more about queues than about engines.
    """
    obstacle = _obstacle(deployment, traffic, serving)
    if obstacle:
        return before, f"corrections stay at {_words(before)}: {obstacle}"
    assert traffic.requests and traffic.isl and traffic.osl
    demand = Demand(traffic.requests / traffic.interval_s, traffic.isl, traffic.osl)
    outlook = Outlook(deployment.slowed(before.prefill, before.decode), demand)
    times = outlook.mean_times(serving)
    if times is None or times.prefill_utilisation > BUSIEST:
        return before, f"corrections stay at {_words(before)}: too busy to tell engines from queues"
    after = Corrections(
        before.prefill
        if outlook.is_aggregated
        else _moved(before.prefill, traffic.ttft_ms, times.mean_ttft_ms),
        _moved(before.decode, traffic.itl_ms, times.mean_itl_ms),
    )
    return after, f"measured over expected: {_words(after)}"


def _obstacle(deployment: Deployment, traffic: Traffic, serving: Targets) -> str:
    if traffic.requests is None:
        return traffic.missing or "nothing was measured"
    if traffic.requests < FEWEST_REQUESTS or not (traffic.isl and traffic.osl):
        return "there were too few requests"
    if not serving.decode or (deployment.prefill and not serving.prefill):
        return "not every role had workers"
    return ""


def _moved(before: float, measured_ms: float | None, expected_ms: float) -> float:
    if not measured_ms or not expected_ms:
        return before
    ratio: float = (measured_ms / expected_ms) ** GAIN
    return min(max(before * ratio, LEAST), MOST)


def _words(corrections: Corrections) -> str:
    return f"prefill {corrections.prefill:.3g}, decode {corrections.decode:.3g}"
