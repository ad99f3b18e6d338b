"""What a planner knows of its engines' steps: of decode workers, which may compute prompts, and of others.

It is a part of each observation, so that a recorded decision can be made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaplan.engines.timing_model.learnt_timing import USABLE_ERROR, LearntTiming, describe
from dynaplan.graph.lifecycle import Role


@dataclass(frozen=True)
class LearntTimings:
    """The learnt timing of each role, None where nothing is known.

    ``is_needed``: there is no profile, so nothing else says how long a step takes. Else a learnt timing
    counts once its predictions are clearly better than the profile's.
    """

    decode: LearntTiming | None = None
    prefill: LearntTiming | None = None
    is_needed: bool = False

    def of(self, role: Role) -> LearntTiming | None:
        return self.prefill if role is Role.PREFILL else self.decode

    def counts(self, role: Role) -> bool:
        """Tell whether the learnt timing of the role stands in the profile's place."""
        known = self.of(role)
        return known is not None and (self.is_needed or known.beats_its_prior)

    def lacking(self, *, is_disaggregated: bool) -> str:
        """Say what must be learnt before workers can be counted by learnt timings; "" when nothing is."""
        if not self.is_needed:
            return ""
        roles = (Role.PREFILL, Role.DECODE) if is_disaggregated else (Role.DECODE,)
        for role in roles:
            known = self.of(role)
            if known is None:
                return (
                    f"the engine of the {role.value} workers does not count its steps, or none was busy yet"
                )
            if not known.is_usable:
                return (
                    f"{role.value} workers: {describe(known)}; until the error is below {USABLE_ERROR:.0%} "
                    "thresholds add, and nothing leaves"
                )
        return ""

    def lines(self, *, is_disaggregated: bool) -> list[str]:
        """Say what is known, a line for each role of which anything is."""
        roles = (Role.PREFILL, Role.DECODE) if is_disaggregated else (Role.DECODE,)
        found = ((role, self.of(role)) for role in roles)
        return [f"{role.value} workers: {describe(known)}" for role, known in found if known]

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back."""
        known = {
            role.value: each.to_json() for role in (Role.DECODE, Role.PREFILL) if (each := self.of(role))
        }
        return {**known, **({"is_needed": True} if self.is_needed else {})}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LearntTimings:
        """Read the mapping of ``to_json``; KeyError, TypeError or ValueError for another."""
        decode, prefill = (
            LearntTiming.from_json(found) if (found := document.get(role.value)) else None
            for role in (Role.DECODE, Role.PREFILL)
        )
        return cls(decode, prefill, bool(document.get("is_needed", False)))
