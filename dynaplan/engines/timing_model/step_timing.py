"""The duration of a step of an engine, from a measured profile or fitted polynomials, and of a hand-off.

A step that decodes ``b`` sequences with ``kv`` tokens of KV and computes prompt chunks takes

    decode(b, kv) + sum over chunks (T(s + c) - T(s)) + the rest of the prefill's fixed cost

milliseconds, for a chunk of ``c`` tokens after ``s`` done. ``T(t)`` is the measured TTFT of a prompt of ``t``
tokens alone, ``T(0)`` the fixed cost of a prefill: it is paid in the step where a prompt begins, and where
that step decodes too only its part above the fixed cost of decoding, decode(1, 0). So a prompt alone takes
exactly ``T(isl)`` in any number of chunks, and a batch alone exactly its measured ITL.

A computed prompt travels from a prefill worker to a decode worker in ``hand_off_s``, as simulations count it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dynaplan.util.documents import shown
from dynaplan.util.errors import ConfigError

PrefillMs = Callable[[int], float]
"""Prompt tokens -> TTFT in ms of such a prompt alone; at 0 its fixed cost."""
DecodeMs = Callable[[int, float], float]
"""Sequences in the batch, sum of their contexts in tokens -> ms of a step that only decodes."""


class StepTiming:
    """The duration of steps; see the module's formula."""

    __slots__ = ("_decode_fixed_ms", "_prefill_fixed_ms", "decode_ms", "prefill_ms")

    def __init__(self, prefill_ms: PrefillMs, decode_ms: DecodeMs) -> None:
        self.prefill_ms = prefill_ms
        self.decode_ms = decode_ms
        self._prefill_fixed_ms = prefill_ms(0)
        self._decode_fixed_ms = decode_ms(1, 0.0)

    def with_speedup(self, ratio: float) -> StepTiming:
        """Return a timing whose every step is ``ratio`` times as fast."""
        if ratio == 1:
            return self
        prefill_ms, decode_ms = self.prefill_ms, self.decode_ms
        return StepTiming(
            lambda tokens: prefill_ms(tokens) / ratio,
            lambda decodes, kv_tokens: decode_ms(decodes, kv_tokens) / ratio,
        )

    def step_ms(
        self, decodes: int, kv_tokens: float, chunks: Sequence[tuple[int, int]], starts: int
    ) -> float:
        """Return the ms of one step; chunks are (tokens done, tokens to do), ``starts`` of them begin a
        prompt."""
        prefill_ms, begin_ms, chunks_ms = self.prefill_ms, self._prefill_fixed_ms, 0.0
        for done, size in chunks:
            before_ms = prefill_ms(done) if done else begin_ms
            chunks_ms += max(prefill_ms(done + size) - before_ms, 0.0)
        fixed_ms = self._prefill_fixed_ms if starts else 0.0
        if not decodes:
            return fixed_ms + chunks_ms
        return self.decode_ms(decodes, kv_tokens) + chunks_ms + max(fixed_ms - self._decode_fixed_ms, 0.0)


PREFILL_KEYS = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
"""The arrays of a measured profile's prefill half."""

DECODE_KEYS = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu", "max_kv_tokens")
"""The arrays of its decode half, and the one number."""

_ARRAYS = (*PREFILL_KEYS, *DECODE_KEYS[:-1])


@dataclass(frozen=True)
class MeasuredProfile:
    """One engine configuration as measured, in the units of Dynamo's profiler.

    Prompt lengths and contexts in tokens, TTFT and ITL in ms, throughput in tokens/s per GPU,
    ``x_kv_usage`` as a fraction of ``max_kv_tokens``. The decode points are scattered, not a grid.
    ``origin`` is empty for measurements; of an estimate it says that it is one, and how far to believe it.
    """

    prefill_isl: tuple[float, ...]
    prefill_ttft: tuple[float, ...]
    prefill_thpt_per_gpu: tuple[float, ...]
    x_kv_usage: tuple[float, ...]
    y_context_length: tuple[float, ...]
    z_itl: tuple[float, ...]
    z_thpt_per_gpu: tuple[float, ...]
    max_kv_tokens: int
    origin: str = ""

    @classmethod
    def from_document(cls, document: Mapping[str, Any], name: str) -> MeasuredProfile:
        """Read a profile's JSON; raises ConfigError, naming the profile, when it is not one."""
        try:
            arrays = {key: tuple(float(value) for value in document[key]) for key in _ARRAYS}
            kv_tokens, origin = int(float(document["max_kv_tokens"])), str(document.get("origin") or "")
            profile = cls(max_kv_tokens=kv_tokens, origin=origin, **arrays)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"profile '{name}' is not a measured profile: {shown(error)}",
                hint=f"Expected the keys {', '.join(_ARRAYS)} (lists of numbers) and max_kv_tokens.",
            ) from error
        profile._check(name)
        return profile

    def _check(self, name: str) -> None:
        prefill = {len(self.prefill_isl), len(self.prefill_ttft), len(self.prefill_thpt_per_gpu)}
        decode = {len(self.x_kv_usage), len(self.y_context_length), len(self.z_itl), len(self.z_thpt_per_gpu)}
        if len(prefill) > 1 or len(decode) > 1 or len(set(self.prefill_isl)) < 2 or not self.x_kv_usage:
            raise ConfigError(
                f"profile '{name}' has arrays of unequal length, or too few points",
                hint="Expected at least two prefill points and one decode point, with all their values.",
            )
        is_finite = all(math.isfinite(value) for key in _ARRAYS for value in getattr(self, key))
        if self.max_kv_tokens < 1 or not is_finite or min(*self.prefill_ttft, *self.z_itl) <= 0:
            raise ConfigError(
                f"profile '{name}' holds a time or a KV size that is not positive, or no number",
                hint="Expected prefill_ttft and z_itl in ms, max_kv_tokens in tokens.",
            )

    def timing(self) -> StepTiming:
        return StepTiming(
            _Curve(self.prefill_isl, self.prefill_ttft),
            _Surface(self.x_kv_usage, self.y_context_length, self.z_itl, self.max_kv_tokens),
        )


class _Curve:
    """Interpolates linearly between points; beyond them the first and the last line go on, not below 0."""

    __slots__ = ("_lines", "_starts")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        points = sorted(zip(xs, ys, strict=True))
        pairs = [(left, right) for left, right in pairwise(points) if left[0] < right[0]]
        self._starts = [left[0] for left, _ in pairs[1:]]
        self._lines = [
            (left[0], left[1], (right[1] - left[1]) / (right[0] - left[0])) for left, right in pairs
        ]

    def __call__(self, x: float) -> float:
        x0, y0, slope = self._lines[bisect_right(self._starts, x)]
        y = y0 + slope * (x - x0)
        return y if y > 0.0 else 0.0


class _Surface:
    """Interpolates ITL over (KV usage, mean context): linear in usage within a context, and between contexts.

    Outside of the measured points the nearest measured edge counts: below and above them lie cells in which
    nothing changes. The strip between two contexts is cut at the points of both, so that it is one bilinear
    function in each of its cells.
    """

    __slots__ = ("_contexts", "_max_kv_tokens", "_strips")

    def __init__(
        self, usages: Sequence[float], contexts: Sequence[float], itls: Sequence[float], max_kv_tokens: int
    ) -> None:
        self._max_kv_tokens = max_kv_tokens
        self._contexts = sorted(set(contexts))
        points = sorted(zip(contexts, usages, itls, strict=True))
        rows = [_row([each[1:] for each in points if each[0] == context]) for context in self._contexts]
        between = pairwise(zip(self._contexts, rows, strict=True))
        self._strips = [
            _strip((0.0, rows[0]), (1.0, rows[0])),
            *(_strip(below, above) for below, above in between),
            _strip((0.0, rows[-1]), (1.0, rows[-1])),
        ]

    def __call__(self, decodes: int, kv_tokens: float) -> float:
        usage = kv_tokens / self._max_kv_tokens
        context = kv_tokens / decodes
        places, cells = self._strips[bisect_right(self._contexts, context)]
        base, by_usage, by_context, by_both = cells[bisect_right(places, usage)]
        return base + by_usage * usage + (by_context + by_both * usage) * context


_Row = tuple[list[float], list[tuple[float, float]]]
"""The places of the points of one context, ascending; the lines below each and above all, at 0 and slope."""

_Strip = tuple[list[float], list[tuple[float, float, float, float]]]
"""The places of the points of two contexts, and the cells below each and above all: the value at (0, 0), the
slopes by usage and by context, and by their product."""


def _row(points: Sequence[tuple[float, float]]) -> _Row:
    lines = [(points[0][1], 0.0)]
    for (x0, y0), (x1, y1) in pairwise(points):
        slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0  # measured twice: the later one goes on
        lines.append((y0 - slope * x0, slope))
    return [x for x, _ in points], [*lines, (points[-1][1], 0.0)]


def _strip(below: tuple[float, _Row], above: tuple[float, _Row]) -> _Strip:
    (low, row), (high, next_row) = below, above
    places = sorted({*row[0], *next_row[0]})
    cells = []
    for place in (-math.inf, *places):
        (base, slope), (base_above, slope_above) = _line(row, place), _line(next_row, place)
        by_context, by_both = (base_above - base) / (high - low), (slope_above - slope) / (high - low)
        cells.append((base - by_context * low, slope - by_both * low, by_context, by_both))
    return places, cells


def _line(row: _Row, x: float) -> tuple[float, float]:
    places, lines = row
    return lines[bisect_right(places, x)]


@dataclass(frozen=True)
class FittedTiming:
    """prefill(t) = p0 + p1 t + p2 t^2 and decode(b, kv) = d0 + d1 b + d2 kv, in ms, and one worker's KV."""

    p0: float
    p1: float
    p2: float
    d0: float
    d1: float
    d2: float
    max_kv_tokens: int

    def timing(self) -> StepTiming:
        return StepTiming(
            lambda tokens: self.p0 + (self.p1 + self.p2 * tokens) * tokens,
            lambda decodes, kv_tokens: self.d0 + self.d1 * decodes + self.d2 * kv_tokens,
        )


FITTED: Mapping[str, FittedTiming] = {
    "h100-bf16": FittedTiming(4.90, 0.01657, 6.97e-7, 6.39, 0.0118, 4.14e-5, 410_000),
    "a100-bf16": FittedTiming(7.51, 0.05456, 1.54e-6, 11.58, 0.0291, 8.38e-5, 410_000),
    "h200-bf16": FittedTiming(3.49, 0.01744, 6.46e-7, 4.92, 0.0122, 2.94e-5, 830_000),
    "h200-fp8-fit": FittedTiming(18.55, 0.01411, 4.92e-7, 4.45, 0.0222, 3.16e-5, 945_029),
}
"""Llama-3.1-8B on one GPU. The first three are fits to aiconfigurator 0.12.0 (estimates from measured
operators), the last to the measured H200 profile. KV tokens of the first three: 0.9 of the GPU's memory less
18 GB of weights, at 128 KiB per token."""

MOCKER_KV_BLOCKS = 16_384
"""The KV blocks of Dynamo's mocker by default."""


def mocker_timing(total_kv_tokens: int) -> StepTiming:
    """Return the built-in polynomials of Dynamo's mocker 1.6.1; decoding depends on the share of KV in
    use."""

    def decode_ms(_decodes: int, kv_tokens: float) -> float:
        usage = min(kv_tokens / total_kv_tokens, 1.0)
        return max(1.0, (-25.74 * usage + 54.01) * usage + 5.74)

    return StepTiming(
        lambda tokens: 16.50142 + (1.518344e-2 + 4.209989e-7 * tokens) * tokens,
        decode_ms,
    )


HAND_OFF_BASE_S = 0.001
"""The fixed time of a hand-off, in seconds: finding each other."""

HAND_OFF_S_PER_TOKEN = 128 * 1024 / 64e9
"""The time that the KV entries of one token take, in seconds.

Source: Dynamo's mocker, which moves 128 KiB of KV entries per token (Llama-3.1-8B in 16 bit) over 64 GB/s.
"""


def hand_off_s(prompt_tokens: int) -> float:
    return HAND_OFF_BASE_S + prompt_tokens * HAND_OFF_S_PER_TOKEN
