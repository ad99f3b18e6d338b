"""The error budget: percentiles are promised over a window, so what went better than promised may be spent.

A promise of 95 per cent lets one request in twenty miss its target, in an hour as in a minute. Who keeps it
in every single minute pays for workers that are needed for a few minutes only; who keeps it over the window
may let a short rise pass. The budget pays for that, and never for more than a few times what is promised.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.core.sizing.measured_load import measured_steady_state
from dynaplan.core.sizing.queueing_model import ServiceModel
from dynaplan.domain.planning.sizing import ErrorBudget, SlaTargets
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Traffic

MOST = 6.0
"""So many times what is promised may be missed for a while, however much is left."""

BETWEEN_RISES_S = 1800.0
"""Between two rises of load that no forecast had told, so that for a start-up everybody is late. They are
the likelier in that time the longer it is, and cost the more: four minutes are too long to take the risk."""


def missed(
    service: ServiceModel, traffic: Traffic, serving: Targets, targets: SlaTargets
) -> tuple[float, float] | None:
    """The parts of an interval's requests that missed the TTFT and the ITL target; None is "not known".

    Frontends tell means, and histograms too coarse for this. So the queueing model's distribution is taken,
    stretched until its mean is the one that was measured.
    """
    state = measured_steady_state(service, traffic, serving)
    if state is None or traffic.ttft_ms is None:
        return None
    expected, itl_ms = state.mean_times(serving), traffic.itl_ms or 0.0
    if expected is None:
        return _of_mean(traffic.ttft_ms, targets.ttft_ms), _of_mean(itl_ms, targets.itl_ms)
    ttft_limit_ms = targets.ttft_ms * expected.mean_ttft_ms / max(traffic.ttft_ms, 1e-9)
    itl_limit_ms = targets.itl_ms * expected.mean_itl_ms / max(itl_ms, 1e-9)
    return (
        state.chance_of_ttft_over(ttft_limit_ms, serving),
        state.decode_batch(serving.decode).chance_of_itl_over(itl_limit_ms),
    )


def _of_mean(mean_ms: float, limit_ms: float) -> float:
    """The part over a limit where nothing but the mean is known: all, or as of times without memory."""
    if mean_ms >= limit_ms:
        return 1.0
    return math.exp(-limit_ms / mean_ms) if mean_ms > 0 else 0.0


def after(
    budget: ErrorBudget,
    shares: tuple[float, float] | None,
    traffic: Traffic,
    targets: SlaTargets,
    window_s: float,
) -> ErrorBudget:
    """The budget after an interval in which those parts of the requests missed their targets."""
    fade = math.exp(-traffic.interval_s / window_s)
    ttft, itl = fade * budget.ttft_requests, fade * budget.itl_requests
    if shares and traffic.requests:
        ttft += traffic.requests * (1 - targets.ttft_percentile / 100 - shares[0])
        itl += traffic.requests * (1 - targets.itl_percentile / 100 - shares[1])
    return ErrorBudget(ttft, itl)


def spending(
    budget: ErrorBudget,
    targets: SlaTargets,
    requests_per_s: float,
    within_s: float,
    startup_s: float = 0.0,
) -> SlaTargets:
    """The targets, with what may be missed on top for the budget to be spent within that time.

    With a ``startup_s`` that help takes to come, what a rise that nobody foretold may cost is kept back: all
    requests until then, as often as such rises come.
    """
    coming = max(requests_per_s * within_s, 1.0)
    kept_back = requests_per_s * startup_s * min(1.0, startup_s / BETWEEN_RISES_S)

    def on_top(left: float, percentile: float) -> float:
        return min(max((left - kept_back) / coming, 0.0), (MOST - 1) * (1 - percentile / 100))

    return replace(
        targets,
        ttft_spare=on_top(budget.ttft_requests, targets.ttft_percentile),
        itl_spare=on_top(budget.itl_requests, targets.itl_percentile),
    )


def in_words(budget: ErrorBudget, spent: SlaTargets) -> str:
    """What is left, and what may be missed for now."""
    ttft = _left("TTFT", budget.ttft_requests, spent.ttft_rest)
    return f"error budget: {ttft}; {_left('ITL', budget.itl_requests, spent.itl_rest)}"


def _left(name: str, requests: float, rest: float) -> str:
    may = f"{rest:.0%} may miss it for now"
    if round(requests) < 0:
        return f"{-requests:.0f} requests more than promised missed the {name} lately, {may}"
    return f"{max(requests, 0.0):.0f} requests fewer than promised missed the {name} lately, {may}"
