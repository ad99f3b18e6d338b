"""Inputs and results of sizing for targets: promises, limits, corrections, error budget, prediction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dynaplan.domain.planning.targets import Step, Targets


@dataclass(frozen=True)
class SlaTargets:
    """The promise: TTFT and ITL in ms, and the per cent of the requests that get each.

    The ITL of a request is the mean over its tokens after the first. ``ttft_spare`` and ``itl_spare`` are
    parts of the requests (0 to 1) that may miss on top, because fewer did before: see ``ErrorBudget``.
    """

    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    ttft_percentile: float = 95.0
    itl_percentile: float = 95.0
    ttft_spare: float = 0.0
    itl_spare: float = 0.0

    @property
    def ttft_rest(self) -> float:
        """Part of the requests, 0 to 1, whose TTFT may exceed the target."""
        return 1 - self.ttft_percentile / 100 + self.ttft_spare

    @property
    def itl_rest(self) -> float:
        """Part of the requests, 0 to 1, whose ITL may exceed the target."""
        return 1 - self.itl_percentile / 100 + self.itl_spare


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

    def prefill_beside(self, decode: int) -> int:
        """Return the most prefill workers that the GPUs hold beside that many decode workers, at least 1."""
        return max(1, (self.max_gpus - decode * self.decode_gpus) // self.prefill_gpus)


@dataclass(frozen=True)
class Corrections:
    """Factors by which the engines differ from their profile. Their meaning depends on ``sizing``.

    ``queueing``: how many times as long a step takes, of prefill and of decode (aggregated: decode only);
    smoothed over intervals (``core/sizing/corrections.py``). ``formula``: mean TTFT and mean ITL measured
    over the profile's, waiting included, anew in each interval (``core/sizing/formula.py``).
    """

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class ErrorBudget:
    """Requests that could have missed each target lately without breaking the promise.

    Below 0, that many too many missed. The past fades: what is one ``slo-window`` old counts 37 %
    (``core/sizing/error_budget.py``). ``kept_s`` is the time since an interval last spent too much of it.
    """

    ttft_requests: float = 0.0
    itl_requests: float = 0.0
    kept_s: float = 0.0


@dataclass(frozen=True)
class Decoding:
    """The requests that decode in a fluid (``core/sizing/standing.py``), by the stage of their answer.

    ``step_ms`` is the mean of their steps so far, by stage. ``counted`` of them missed a target already.
    """

    requests: tuple[float, ...] = ()
    step_ms: tuple[float, ...] = ()
    counted: float = 0.0

    @property
    def total(self) -> float:
        """The number of requests that decode, in every stage."""
        return sum(self.requests)


@dataclass(frozen=True)
class StandingTrial:
    """One number of workers that never changes, as it would have fared (``core/sizing/standing.py``).

    ``load`` are the prompts that wait, or the requests that decode; ``late`` the requests that were late, the
    past of one ``slo-window`` ago counting 37 %. ``decoding`` are the requests that decode.
    """

    load: float = 0.0
    late: float = 0.0
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True)
class Standing:
    """Trials of every number of workers of each role, from 1 on; ``requests`` came, faded as ``late``."""

    requests: float = 0.0
    prefill: tuple[StandingTrial, ...] = ()
    decode: tuple[StandingTrial, ...] = ()


@dataclass(frozen=True)
class Missed:
    """Requests that missed a target, and the doubt of their number: bursts are few, however large.

    ``requests`` fade with ``slo-window``, ``squares`` (of the misses of each burst) twice as fast. ``run``
    are the misses of the burst that goes on, for ``run_s`` seconds until now.
    """

    requests: float = 0.0
    squares: float = 0.0
    run: float = 0.0
    run_s: float = 0.0


@dataclass(frozen=True)
class ExpertTrial:
    """One expert on the number of workers, as it would have fared (``core/sizing/trials/experts.py``).

    It stands still at ``workers``, or ``follows`` the forecast and has at least these. ``queue`` are prompts
    that wait, ``in_time`` those of them that can still be in time; late ones have waited for ``late_s``.
    ``decoding`` are the requests that decode. One that stands still has gone along with the forecast for
    ``chased_s``, and for ``helped_s`` of these because a burst lasts. ``held_gpu_s`` are the GPU-seconds that
    it held, faded with ``slo-window``; ``late`` are requests over the TTFT, ``long`` others over the ITL.
    """

    workers: Targets = field(default_factory=Targets)
    follows: bool = True
    queue: float = 0.0
    in_time: float = 0.0
    late_s: float = 0.0
    decoding: Decoding = field(default_factory=Decoding)
    chased_s: float = 0.0
    helped_s: float = 0.0
    held_gpu_s: float = 0.0
    late: Missed = field(default_factory=Missed)
    long: Missed = field(default_factory=Missed)

    def emptied(self) -> ExpertTrial:
        """Return the trial after an interval without requests."""
        return replace(self, queue=0.0, in_time=0.0, decoding=Decoding())


@dataclass(frozen=True)
class Lived:
    """The workers that served, by the fluid (``trial``), beside what was counted with them.

    ``late`` requests were over the TTFT, ``long`` others over the ITL; both fade with ``slo-window``.
    ``older`` are the workers that were there before others came, while they have more than their share.
    """

    trial: ExpertTrial = field(default_factory=ExpertTrial)
    late: float = 0.0
    long: float = 0.0
    older: ExpertTrial = field(default_factory=ExpertTrial)


@dataclass(frozen=True)
class Hedge:
    """The hedge's memory; sums fade with ``slo-window``.

    ``followed`` are the workers that the forecast needed in the last intervals, the newest last; ``most``
    the most of what it needed before them, ``newest`` of that what it needed in the last ``newest_s``.
    ``seconds`` were seen, in which ``requests`` came; their mean load needed the ``leasts``, the newest last.
    ``trusted`` is the expert that is asked: its workers, and whether it follows; None before any was tried.
    ``lived`` are the workers that served, whatever any expert wanted.
    """

    trials: tuple[ExpertTrial, ...] = ()
    followed: tuple[Targets, ...] = ()
    seconds: float = 0.0
    requests: float = 0.0
    leasts: tuple[Targets, ...] = ()
    most: Targets = field(default_factory=Targets)
    newest: Targets = field(default_factory=Targets)
    newest_s: float = 0.0
    trusted: tuple[Targets, bool] | None = None
    lived: Lived = field(default_factory=Lived)

    @property
    def least(self) -> Targets:
        """The workers that the mean load needs now."""
        return self.leasts[-1] if self.leasts else Targets()


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
