"""Numbers of workers, and one stage of how they came about."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.fleet.counts import Targets


@dataclass(frozen=True)
class Step:
    """One stage of a decision: the numbers before and after it, and why. "Unchanged" is a result too."""

    stage: str
    before: Targets
    after: Targets
    why: str
