"""Inputs and results of sizing for targets: promises, limits, corrections, error budget, prediction."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaplan.fleet.counts import Targets
from dynaplan.planner.model.targets import Step

UNLIMITED = Targets(10**9, 10**9)
"""The numbers of workers where nobody has set a maximum."""


@dataclass(frozen=True)
class WorkerLimits:
    """The bounds of the numbers of workers: GPUs in all, GPUs of one worker, minimums and maximums.

    An aggregated service has no prefill workers: its minimum of them is 0. ``most`` goes before ``least``.
    """

    max_gpus: int = 8
    prefill_gpus: int = 1
    decode_gpus: int = 1
    least: Targets = field(default_factory=lambda: Targets(1, 1))
    most: Targets = UNLIMITED

    def capped(self, workers: Targets) -> Targets:
        """Return the smaller number for each role: of these and of ``most``."""
        return Targets(min(workers.prefill, self.most.prefill), min(workers.decode, self.most.decode))

    def gpus(self, workers: Targets) -> int:
        """Return the GPUs that these numbers of workers need."""
        return workers.prefill * self.prefill_gpus + workers.decode * self.decode_gpus


@dataclass(frozen=True)
class Corrections:
    """Factors by which the engines differ from their profile. Their meaning depends on ``sizing``.

    ``queueing``: how many times as long a step takes, of prefill and of decode (aggregated: decode only);
    smoothed over intervals (``planner/sizing/corrections.py``). ``formula``: mean TTFT and mean ITL measured
    over the profile's, waiting included, anew in each interval (``planner/sizing/formula.py``).
    """

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class ErrorBudget:
    """Requests that could have missed each target lately without breaking the promise.

    Below 0, that many too many missed. The past fades: what is one ``slo-window`` old counts 37 %
    (``planner/sizing/error_budget.py``). ``kept_s`` is the time since an interval last spent too much of it.
    """

    ttft_requests: float = 0.0
    itl_requests: float = 0.0
    kept_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The times that a number of workers gives a demand: at the targets' percentiles, and means; in ms.

    ``prefill_utilisation`` is the part of its time in which a prefill (or aggregated) worker computes
    prompts, ``kv_usage`` the mean part of the KV cache in use, ``batch`` the mean number of requests that
    one worker decodes at once. ``overload`` says what does not fit; the times are then infinite.
    """

    ttft_ms: float
    itl_ms: float
    mean_ttft_ms: float
    mean_itl_ms: float
    prefill_utilisation: float
    kv_usage: float
    batch: float
    overload: str = ""


@dataclass(frozen=True)
class Sizing:
    """The workers that a demand needs, what is expected of them, and the steps of the trail.

    ``prediction`` is None with ``sizing: formula``, which predicts nothing.
    """

    targets: Targets
    steps: tuple[Step, ...] = field(default=())
    prediction: Prediction | None = None
