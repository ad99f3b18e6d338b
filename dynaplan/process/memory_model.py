"""The memory of a box."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BoxMemory:
    """The memory of a box in bytes: all of it, and what is available at this moment."""

    total_bytes: int
    available_bytes: int
