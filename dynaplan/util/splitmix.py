"""Random numbers that are the same for the same seed, in every process and on every machine.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): a
64-bit counter that grows by a constant, each of its values mixed by two multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_MASK = 0xFFFFFFFFFFFFFFFF
_BELOW_ONE = math.nextafter(1.0, 0.0)


class UniformDraws:
    """Independent numbers for ever, each alike probable anywhere in [0, 1). A deep copy goes on alike."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        self._state = state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return min((mixed ^ (mixed >> 31)) / 2**64, _BELOW_ONE)  # the largest integers round to 1.0
