"""What the SLA planner plans with: what was promised, what bounds it, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.planning.targets import Step, Targets
from dynaplan.domain.settings.fields import given_values, option, option_name


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

    def tightened(self, factor: float) -> SlaTargets:
        """These with both times multiplied by a factor, below 1 to leave room."""
        return replace(self, ttft_ms=self.ttft_ms * factor, itl_ms=self.itl_ms * factor)


@dataclass(frozen=True)
class Limits:
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

    def meets(self, targets: SlaTargets) -> bool:
        """Whether both targets hold."""
        return not self.overload and self.ttft_ms <= targets.ttft_ms and self.itl_ms <= targets.itl_ms


@dataclass(frozen=True)
class Sizing:
    """How many workers a demand needs, what they are expected to make of it, and the story.

    ``prediction`` is None where the formulas predict nothing.
    """

    targets: Targets
    steps: tuple[Step, ...] = field(default=())
    prediction: Prediction | None = None


SIZINGS = ("queueing", "formula")
"""How the SLA planner sizes: by the queueing model, or by the formulas of Dynamo's planner."""


@dataclass(frozen=True)
class SlaSettings:
    """Every option of sizing for targets, by the original's names and defaults, and a few of our own."""

    ttft_ms: float = option(500.0, "Time to the first token that is promised, ms", above=0)
    itl_ms: float = option(50.0, "Time between tokens that is promised, ms", above=0)
    ttft_percentile: float = option(95.0, "Per cent of the requests that get the TTFT", above=0)
    itl_percentile: float = option(95.0, "Per cent of the requests that get the ITL", above=0)
    slo_window_s: float = option(
        3600.0, "Seconds over which the percentiles are promised; 0: in every interval", least=0
    )
    isl_tokens: int = option(3000, "Length of prompts until one has been seen", least=1)
    osl_tokens: int = option(500, "Length of answers until one has been seen", least=1)
    profile_results_dir: str = option(
        "profiling_results", "Directory of the engine's profile, or the name of a shipped one"
    )
    no_correction: bool = option(False, "Trust the profile: do not compare it with what is measured")
    sizing: str = option("queueing", f"How workers are counted: {' or '.join(SIZINGS)}")
    scale_down_headroom: float = option(
        0.15, "Part by which demand could grow before a worker that is removed were missed", least=0
    )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SlaSettings:
        """Check options as the user wrote them, keys in kebab or snake case; as ``PlannerSettings`` does."""
        settings = cls(**given_values(cls, options))
        settings.check_sizing()
        return settings

    def to_options(self) -> dict[str, Any]:
        """Option -> value, as ``from_options`` reads it."""
        return {option_name(each): getattr(self, each.name) for each in fields(self)}

    def check_sizing(self) -> None:
        """Raise ConfigError for what the type of an option does not tell."""
        for name in ("ttft_percentile", "itl_percentile"):
            if getattr(self, name) >= 100:
                raise ConfigError(
                    f"Planner.{name.replace('_', '-')}: {getattr(self, name):g}",
                    hint="expected a number between 0 and 100: nothing can be promised to everybody",
                )
        if self.sizing not in SIZINGS:
            raise ConfigError(
                f"Planner.sizing: {self.sizing!r}", hint=f"expected one of {', '.join(SIZINGS)}"
            )

    def targets(self) -> SlaTargets:
        """What was promised."""
        return SlaTargets(self.ttft_ms, self.itl_ms, self.ttft_percentile, self.itl_percentile)
