"""The workers that were told to leave last, and why: published with the fleet, for ``dynaplan why``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dynaplan.util.documents import number_field, text_field

REMOVALS = "removals"
"""The field of the published fleet with the last removals, the newest last."""

MOST_REMOVALS = 8
"""The removals that are published."""


@dataclass(frozen=True)
class Removal:
    """One worker that was told to leave, at ``at_unix_s`` on the wall clock, and why."""

    worker: str
    at_unix_s: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return the published form."""
        return asdict(self)


def removals_in(fleet: Mapping[str, Any]) -> tuple[Removal, ...]:
    """Read the removals of a published fleet; what cannot be read is left out."""
    found = []
    listed = fleet.get(REMOVALS)
    for each in listed if isinstance(listed, list) else ():
        try:
            known = each if isinstance(each, dict) else {}
            found.append(
                Removal(
                    text_field(known, "worker"), number_field(known, "at_unix_s"), text_field(known, "why")
                )
            )
        except ValueError:
            continue
    return tuple(found)
