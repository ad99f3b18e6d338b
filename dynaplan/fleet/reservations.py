"""Reservations: GPUs that a person has taken from a deployment, for a time or for hours of every day.

They travel as one JSON object under ``v1/{namespace}/planner/reservations``, by the index of the GPU. The
maker and the end are those of a hold, whose bounds mean nothing here: ``{"7": {"by": "alice", "until_s":
1795356000, ...}}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.fleet.holds import Hold, Zones
from dynaplan.util.documents import parse_object, shown, whole_number

RESERVATIONS = "reservations"
"""The key of the reservations, below ``planner_prefix``."""

MOST_GPUS = 1024
"""The largest index of a GPU that can be reserved."""


@dataclass(frozen=True)
class ReservedGpus:
    """The reserved GPUs: index -> its maker and its end."""

    by_gpu: Mapping[int, Hold] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> ReservedGpus:
        """Read the key's value; "" is a key that is missing. Raises ValueError, and nothing else."""
        document = parse_object(text) if text else {}
        return cls({_index(name): _made(name, document[name]) for name in document})

    def to_text(self) -> str:
        """Write them as the store's key has them: JSON without spaces."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return plain data: {} without any."""
        return {str(index): made.to_json() for index, made in sorted(self.by_gpu.items())}

    @property
    def sentences(self) -> dict[str, Hold]:
        """The reservations, by a sentence: "GPU 7 was reserved by alice until 2026-11-22 14:00 +0100"."""
        return {f"GPU {index} was {reserved_words(made)}": made for index, made in self.by_gpu.items()}

    def with_gpus(self, made: Mapping[int, Hold]) -> ReservedGpus:
        """Return a copy with these GPUs reserved, too."""
        return ReservedGpus({**self.by_gpu, **made})

    def without(self, gpus: frozenset[int]) -> ReservedGpus:
        """Return a copy without these GPUs."""
        return ReservedGpus({index: made for index, made in self.by_gpu.items() if index not in gpus})

    def lasting(self, now_s: float) -> ReservedGpus:
        """Return those whose deadline has not passed, open or not; seconds since 1970-01-01 UTC."""
        left = {index: made.left_s(now_s) for index, made in self.by_gpu.items()}
        over = frozenset(index for index, left_s in left.items() if left_s is not None and left_s <= 0)
        return self.without(over)

    def in_force(self, now_s: float, zones: Zones) -> dict[int, Hold]:
        """Return the GPUs that are reserved at this moment, with the maker and the end."""
        lasting = self.lasting(now_s).by_gpu
        return {index: made for index, made in sorted(lasting.items()) if made.is_open(now_s, zones)}


def reserved_words(made: Hold) -> str:
    """Return the reason why nothing else gets the GPU: ``reserved by alice until 2026-11-22 14:00 +0100``."""
    maker = f" by {made.by}" if made.by else ""
    return f"reserved{maker} {made.ending}"


def _index(name: str) -> int:
    index = whole_number(name)
    if index is None or not 0 <= index <= MOST_GPUS:
        raise ValueError(f"{shown(name)}: expected the index of a GPU")
    return index


def _made(name: str, found: Any) -> Hold:
    if not isinstance(found, dict):
        raise ValueError(f"'{name}' is {shown(found)}: expected a JSON object")
    return Hold.from_json(found)
