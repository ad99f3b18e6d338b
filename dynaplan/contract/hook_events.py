"""The events that a hook of the user's is called at, as the fleet plugin and the planner report them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

FAILED, SCALED, TARGET_MISSED, MODEL, GPU = "failed", "scaled", "target_missed", "model", "gpu"
"""The kinds of events."""


@dataclass(frozen=True)
class HookEvent:
    """One event: its kind, and what has happened in words."""

    kind: str
    text: str


class DecisionEventSource(Protocol):
    """Where the fleet plugin polls for events among a planner's decisions: scaled, a target missed."""

    def poll(self) -> Iterable[HookEvent]:
        """Return those since the last poll; the first one returns none."""
        ...
