"""The options of sizing for targets: what is promised, the profile, and how workers are counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.planning.sizing import SlaTargets
from dynaplan.domain.settings.fields import given_values, option, option_name

SIZINGS = ("queueing", "formula")
"""Ways of sizing: the queueing model, or the formulas of Dynamo's planner."""


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
        """Return the promise."""
        return SlaTargets(self.ttft_ms, self.itl_ms, self.ttft_percentile, self.itl_percentile)
