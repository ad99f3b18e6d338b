"""Look-ups in a profile's tables, with the numbers of Dynamo's interpolators (versions 0.7 to 1.2).

**Prefill**: cubic splines over the prompt length, a d^3 + b d^2 + c d + e at the distance d from the
breakpoint below (in the original ``scipy.interpolate.interp1d(kind="cubic")``). A length outside of the
measured range counts as its nearest end.

**Decode**: a grid of 100 x 100 points over context and KV usage (in the original ``griddata``), of which
the nearest point is read. KV usage = concurrency x context / KV cache, clipped to 0..1; of two equally near
points the one with the even index is read, as numpy rounds.

Wrong by up to half a cell of the grid: at a context of 1000 tokens neighbouring points are 9 requests
apart. The queueing model reads the measured points with straight lines between them instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from dynaplan.planner.profiles.profile_tables import DecodePoint, DecodeTable, Piece, PrefillTable


class PrefillInterpolator:
    """TTFT and prefill throughput by prompt length."""

    __slots__ = ("_table",)

    def __init__(self, table: PrefillTable) -> None:
        self._table = table

    def ttft_ms(self, isl_tokens: float) -> float:
        """Return the TTFT in ms of a prompt of that length alone on the engine."""
        return self._at(isl_tokens, self._table.ttft_ms)

    def tokens_per_s_per_gpu(self, isl_tokens: float) -> float:
        """Return the prompt tokens that the engine computes, tokens/s per GPU."""
        return self._at(isl_tokens, self._table.tokens_per_s_per_gpu)

    def _at(self, tokens: float, pieces: Sequence[Piece]) -> float:
        breakpoints = self._table.breakpoints_tokens
        tokens = min(max(tokens, breakpoints[0]), breakpoints[-1])
        index = min(bisect_right(breakpoints, tokens), len(pieces)) - 1
        distance = tokens - breakpoints[index]
        a, b, c, d = pieces[index]
        return ((a * distance + b) * distance + c) * distance + d


class DecodeInterpolator:
    """ITL and decode throughput by concurrency and context, from the nearest point of the grid."""

    __slots__ = ("_columns", "_rows", "_table")

    def __init__(self, table: DecodeTable) -> None:
        self._table = table
        self._rows = len(table.itl_ms)
        self._columns = len(table.itl_ms[0])

    def itl_ms(self, concurrency: float, context_tokens: float) -> float:
        """Return the ITL in ms with ``concurrency`` requests of that mean context in the engine."""
        return self._table.itl_ms[self._row(context_tokens)][self._column(concurrency, context_tokens)]

    def tokens_per_s_per_gpu(self, concurrency: float, context_tokens: float) -> float:
        """Return the tokens that ``concurrency`` requests of that context get, tokens/s per GPU."""
        row, column = self._row(context_tokens), self._column(concurrency, context_tokens)
        return self._table.tokens_per_s_per_gpu[row][column]

    def find_best_throughput_per_gpu(self, itl_ms: float, context_tokens: float) -> DecodePoint:
        """Return the fullest point whose ITL does not exceed ``itl_ms``; the emptiest when there is none.

        Fullest by KV usage, as in the original: where throughput falls again, a less full point would be
        better.
        """
        row = self._row(context_tokens)
        itls_ms = self._table.itl_ms[row]
        column = next((index for index in reversed(range(self._columns)) if itls_ms[index] <= itl_ms), 0)
        throughput = self._table.tokens_per_s_per_gpu[row][column]
        return DecodePoint(throughput, itls_ms[column], column / (self._columns - 1))

    def _row(self, context_tokens: float) -> int:
        return _nearest(context_tokens, self._table.longest_context_tokens, self._rows)

    def _column(self, concurrency: float, context_tokens: float) -> int:
        return _nearest(concurrency * context_tokens, self._table.max_kv_tokens, self._columns)


def _nearest(value: float, highest: float, points: int) -> int:
    """Return the index of the nearest of ``points`` evenly spaced from 0 to ``highest``."""
    scaled = min(max(value / highest * (points - 1), 0.0), points - 1.0)
    return round(scaled)
