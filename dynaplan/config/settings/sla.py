"""The options of sizing for targets: what is promised, the profile, and how workers are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynaplan.config.settings.fields import READ, Settings, option

SIZINGS = ("queueing", "formula")
"""Ways of sizing: the queueing model, or the formulas of Dynamo's planner."""


@dataclass(frozen=True)
class SlaSettings(Settings):
    """Every option of sizing for targets, by the original's names and defaults, and a few of our own."""

    SECTION: ClassVar[str] = "Planner"

    ttft_ms: float = option(500.0, "Time to the first token that is promised, ms", above=0)
    itl_ms: float = option(50.0, "Time between tokens that is promised, ms", above=0)
    ttft_percentile: float = option(95.0, "Per cent of the requests that get the TTFT", above=0, below=100)
    itl_percentile: float = option(95.0, "Per cent of the requests that get the ITL", above=0, below=100)
    slo_window_s: float = option(
        3600.0, "Seconds over which the percentiles are promised; 0: in every interval", least=0
    )
    isl_tokens: int = option(3000, "Length of prompts until one has been seen", least=1)
    osl_tokens: int = option(500, "Length of answers until one has been seen", least=1)
    profile_results_dir: str = option(
        "profiling_results", "Directory of the engine's profile, or the name of a shipped one", path=READ
    )
    no_correction: bool = option(False, "Trust the profile: do not compare it with what is measured")
    sizing: str = option("queueing", "How workers are counted", choices=SIZINGS)
    learnt_floor: bool = option(
        False, "Keep as many workers as would have kept the promise over the last `slo-window`: for bursts"
    )
    hedge: bool = option(
        True,
        "Stand still or follow the forecast, whichever would have kept the promise with fewer GPUs over the "
        "last `slo-window`: for bursts, with `prefill-deadline`",
    )
    scale_down_headroom: float = option(
        0.15, "Part by which demand could grow before a worker that is removed were missed", least=0
    )

    def targets(self) -> SlaTargets:
        """Return the promised times, in ms, with the percentages of requests that get them."""
        return SlaTargets(self.ttft_ms, self.itl_ms, self.ttft_percentile, self.itl_percentile)


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
