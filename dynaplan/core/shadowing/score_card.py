"""The scores of two policies side by side, and which of them did better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dynaplan.domain.errors import UserError
from dynaplan.domain.planning.decisions import Decision, DecisionRecord
from dynaplan.domain.planning.score import PolicyScore


class Tolerances(NamedTuple):
    """The differences that count as none: points of attainment, and per cent of the GPU hours.

    A model that is itself some per cent wrong cannot tell smaller ones apart. The defaults: a fifth of the
    misses that a promise of 95 % allows, and one GPU in twenty.
    """

    points: float = 1.0
    per_cent: float = 5.0


USUAL = Tolerances()
"""The default tolerances."""


class Difference(NamedTuple):
    """The difference of two scores: points of attainment gained, and per cent more GPU hours."""

    points: float
    per_cent: float

    @classmethod
    def between(cls, old: PolicyScore, new: PolicyScore) -> Difference:
        """Return the difference from the old score to the new one; 0 where one is not known."""
        points = 0.0
        if old.attainment is not None and new.attainment is not None:
            points = 100 * (new.attainment - old.attainment)
        return cls(points, 100 * (new.gpu_s / old.gpu_s - 1) if old.gpu_s else 0.0)

    def is_worse(self, within: Tolerances) -> bool:
        """Tell whether attainment was lost, or GPU hours were spent that did not pay in attainment."""
        is_dearer = self.per_cent > within.per_cent
        return self.points < -within.points or (is_dearer and self.points <= within.points)

    def is_better(self, within: Tolerances) -> bool:
        """Tell whether one of the two was gained beyond the tolerance while the other was not lost."""
        is_gained = self.points > within.points or self.per_cent < -within.per_cent
        return is_gained and self.points >= -within.points and self.per_cent <= within.per_cent

    def __str__(self) -> str:
        more, dearer = "more" if self.points >= 0 else "fewer", "more" if self.per_cent >= 0 else "fewer"
        gained = f"{abs(self.points):.1f} points {more} in time"
        return f"{gained}, with {abs(self.per_cent):.1f} % {dearer} GPU hours"


def card_rows(scores: Mapping[str, PolicyScore]) -> list[list[str]]:
    """Return a table of the scores by the policies' names, its headings first."""
    rows = [["policy", "in time", "late", "GPU hours", "mean GPUs", "changes"]]
    for name, score in scores.items():
        in_time = "-" if score.attainment is None else f"{score.attainment:.1%}"
        late = f"{score.late:.0f}"
        hours = f"{score.gpu_hours:.2f}"
        rows.append([name, in_time, late, hours, f"{score.gpus:.2f}", str(score.changes)])
    return rows


def verdict(name: str, old: PolicyScore, new: PolicyScore, within: Tolerances = USUAL) -> str:
    """Say in a sentence whether the new policy, by its name, did better than the old one."""
    difference = Difference.between(old, new)
    if not old.requests or not new.requests:
        return f"{name}: no requests yet to compare by"
    if difference.is_better(within):
        word = "better"
    elif difference.is_worse(within):
        word = "worse"
    elif abs(difference.points) > within.points or abs(difference.per_cent) > within.per_cent:
        word = "better for requests, and dearer"
    else:
        word = "as good, within what the model can tell"
    return f"{name} would have been {word}: {difference} (by the model)"


class ShadowedInterval(NamedTuple):
    """One recorded decision with the shadow's beside it, in words, and the scores after it."""

    wall_time: str
    live: str
    shadow: str
    options: str
    since: str
    live_score: PolicyScore
    shadow_score: PolicyScore


def shadowed_intervals(documents: Sequence[Mapping[str, Any]]) -> list[ShadowedInterval]:
    """Read lines of ``decisions.jsonl``; those without a shadow, or that cannot be read, are left out."""
    found = []
    for document in documents:
        try:
            record = DecisionRecord.from_json(document)
        except (KeyError, TypeError, ValueError, AttributeError, UserError):
            continue
        if shadow := record.shadow:
            options = ", ".join(f"{name}: {value}" for name, value in sorted(shadow.options.items()))
            found.append(
                ShadowedInterval(
                    record.wall_time,
                    _told(record.decision),
                    _told(shadow.decision),
                    options or "the same options",
                    shadow.since,
                    shadow.live_score,
                    shadow.shadow_score,
                )
            )
    return found


def _told(decision: Decision) -> str:
    if decision.is_change:
        return f"{decision.current} -> {decision.desired}: {decision.reason}"
    return f"no change ({decision.current}): {decision.reason}"
