"""Holds for hours of the week, beside the one that is made for now: ``decode=3`` at ``09:00-17:00 mon-fri``.

They travel as one JSON object under ``v1/{namespace}/planner/hours``: ``{"decode": [{"at_least": 3,
"at_most": 3, "at": "09:00-17:00 mon-fri", "zone": "Europe/Berlin", ...}]}``. Of several whose hours are open
the one that was made last counts; a hold without hours comes before all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.fleet.desired_counts import SCALED_ROLES
from dynaplan.fleet.holds import Hold, RoleHolds, Zones
from dynaplan.graph.lifecycle import Role
from dynaplan.util.documents import parse_object, shown

HOURS = "hours"
"""The key of the held hours, below ``planner_prefix``."""

MOST_OF_A_ROLE = 50
"""Holds with hours that a role may have."""


@dataclass(frozen=True)
class HeldHours:
    """The holds with hours, by role; of each role in the order of their making."""

    by_role: Mapping[Role, tuple[Hold, ...]] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> HeldHours:
        """Read the key's value; "" is a key that is missing. Raises ValueError, and nothing else."""
        document = parse_object(text) if text else {}
        found = {role: _holds(document.get(role.value, []), role) for role in SCALED_ROLES}
        return cls({role: holds for role, holds in found.items() if holds})

    def to_text(self) -> str:
        """Write them as the store's key has them: JSON without spaces."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return plain data: {} without any."""
        return {role.value: [hold.to_json() for hold in holds] for role, holds in self.by_role.items()}

    @property
    def sentences(self) -> dict[str, Hold]:
        """The holds, by a sentence: "decode was held at 3 by alice at 09:00-17:00 (Europe/Berlin)"."""
        found = [(role, hold) for role, holds in self.by_role.items() for hold in holds]
        return {f"{role.value} was {hold}": hold for role, hold in found}

    def with_hold(self, role: Role, hold: Hold) -> HeldHours:
        """Return a copy with one more; it replaces one of the same hours."""
        others = tuple(each for each in self.by_role.get(role, ()) if each.at != hold.at)
        return HeldHours({**self.by_role, role: (*others, hold)[-MOST_OF_A_ROLE:]})

    def without(self, role: Role) -> HeldHours:
        """Return a copy without those of that role."""
        return HeldHours({each: holds for each, holds in self.by_role.items() if each is not role})

    def lasting(self, now_s: float) -> HeldHours:
        """Return those whose deadline has not passed, open or not; seconds since 1970-01-01 UTC."""
        kept = {
            role: tuple(each for each in holds if _lasts(each, now_s)) for role, holds in self.by_role.items()
        }
        return HeldHours({role: holds for role, holds in kept.items() if holds})

    def under(self, holds: RoleHolds, now_s: float, zones: Zones) -> RoleHolds:
        """Return the holds in force: the ones of now, and where a role has none, its hours that are open."""
        for role, hours in self.lasting(now_s).by_role.items():
            is_open = [each for each in hours if each.is_open(now_s, zones)]
            if is_open and holds.of(role) is None:
                holds = holds.replaced(role, is_open[-1])
        return holds


def _lasts(hold: Hold, now_s: float) -> bool:
    left_s = hold.left_s(now_s)
    return left_s is None or left_s > 0


def _holds(found: Any, role: Role) -> tuple[Hold, ...]:
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"'{role.value}' is {shown(found)}: expected a list of holds")
    holds = tuple(map(Hold.from_json, found[:MOST_OF_A_ROLE]))
    if not all(hold.at for hold in holds):
        raise ValueError(f"'{role.value}' has a hold without hours")
    return holds
