"""What the SLA planner sizes with and what comes out: promises, limits, corrections, budgets, predictions."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaplan.domain.planning.targets import Step, Targets


@dataclass(frozen=True)
class SlaTargets:
    """What was promised: TTFT and ITL in ms, and the per cent of requests that get it.

    The ITL of a request is the mean over its tokens after the first. ``ttft_spare`` and ``itl_spare`` are the
    parts of the requests that may miss on top, because fewer did before; see ``ErrorBudget``.
    """

    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    ttft_percentile: float = 95.0
    itl_percentile: float = 95.0
    ttft_spare: float = 0.0
    itl_spare: float = 0.0

    @property
    def ttft_rest(self) -> float:
        """The part of the requests whose TTFT may be longer."""
        return 1 - self.ttft_percentile / 100 + self.ttft_spare

    @property
    def itl_rest(self) -> float:
        """The part of the requests whose ITL may be longer."""
        return 1 - self.itl_percentile / 100 + self.itl_spare


@dataclass(frozen=True)
class WorkerLimits:
    """What bounds the numbers of workers, whatever the demand: GPUs together and of one worker, minimums.

    An aggregated deployment has no prefill workers: its minimum of them is 0.
    """

    max_gpus: int = 8
    prefill_gpus: int = 1
    decode_gpus: int = 1
    least: Targets = field(default_factory=lambda: Targets(1, 1))

    def gpus(self, workers: Targets) -> int:
        """The GPUs of so many workers."""
        return workers.prefill * self.prefill_gpus + workers.decode * self.decode_gpus


@dataclass(frozen=True)
class Corrections:
    """What was measured over what the profile says: of TTFT and of ITL."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class ErrorBudget:
    """How many more requests could have missed each target lately without breaking the promise.

    Below 0 that many too many did. What is long past counts less and less: in the promise's window to 37 %.
    """

    ttft_requests: float = 0.0
    itl_requests: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What a number of workers makes of a demand. Times in ms, at the targets' percentiles and as means.

    ``prefill_utilisation`` is the part of its time that a prefill worker (or an aggregated one) computes
    prompts, ``kv_usage`` that of the KV cache which is in use on average, ``batch`` the mean number of
    requests that one worker decodes at once. ``overload`` says what does not fit, however long one waits;
    the times are then infinite.
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
    """How many workers a demand needs, what they are expected to make of it, and the story.

    ``prediction`` is None where the formulas predict nothing.
    """

    targets: Targets
    steps: tuple[Step, ...] = field(default=())
    prediction: Prediction | None = None
