"""Random numbers that are the same for the same seed, in every process and on every machine.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): a
64-bit counter that grows by a constant, each of its values mixed by two multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_MASK = 0xFFFFFFFFFFFFFFFF
_BELOW_ONE = math.nextafter(1.0, 0.0)


def uniform_draws(seed: int) -> Iterator[float]:
    """Yield independent numbers for ever, each alike probable anywhere in [0, 1)."""
    state = seed & _MASK
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        yield min((mixed ^ (mixed >> 31)) / 2**64, _BELOW_ONE)  # the largest integers round to 1.0
