"""Look-ups in a profile's tables that give the numbers of Dynamo's interpolators (0.7 to 1.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from dynaplan.domain.profile import DecodePoint, DecodeTable, Piece, PrefillTable


class PrefillInterpolator:
    """Prompt length -> TTFT and throughput. Beyond what was measured: the nearest that was."""

    __slots__ = ("_table",)

    def __init__(self, table: PrefillTable) -> None:
        self._table = table

    def ttft_ms(self, isl_tokens: float) -> float:
        """The TTFT of such a prompt alone on the engine."""
        return self._at(isl_tokens, self._table.ttft_ms)

    def tokens_per_s_per_gpu(self, isl_tokens: float) -> float:
        """The prompt tokens that an engine computes in a second, by each of its GPUs."""
        return self._at(isl_tokens, self._table.tokens_per_s_per_gpu)

    def _at(self, tokens: float, pieces: Sequence[Piece]) -> float:
        breakpoints = self._table.breakpoints_tokens
        tokens = min(max(tokens, breakpoints[0]), breakpoints[-1])
        index = min(bisect_right(breakpoints, tokens), len(pieces)) - 1
        distance = tokens - breakpoints[index]
        a, b, c, d = pieces[index]
        return ((a * distance + b) * distance + c) * distance + d


class DecodeInterpolator:
    """KV usage and context -> ITL and throughput, always those of the nearest point of the grid."""

    __slots__ = ("_columns", "_rows", "_table")

    def __init__(self, table: DecodeTable) -> None:
        self._table = table
        self._rows = len(table.itl_ms)
        self._columns = len(table.itl_ms[0])

    def itl_ms(self, concurrency: float, context_tokens: float) -> float:
        """The ITL with so many requests of that mean context in the engine."""
        return self._table.itl_ms[self._row(context_tokens)][self._column(concurrency, context_tokens)]

    def tokens_per_s_per_gpu(self, concurrency: float, context_tokens: float) -> float:
        """The tokens that they get in a second, by each of the engine's GPUs."""
        row, column = self._row(context_tokens), self._column(concurrency, context_tokens)
        return self._table.tokens_per_s_per_gpu[row][column]

    def find_best_throughput_per_gpu(self, itl_ms: float, context_tokens: float) -> DecodePoint:
        """The fullest point whose ITL does not exceed that; the emptiest when there is none.

        Fullest by KV usage, as the original has it: where throughput falls again, it is not the best one.
        """
        row = self._row(context_tokens)
        itls_ms = self._table.itl_ms[row]
        column = next((each for each in reversed(range(self._columns)) if itls_ms[each] <= itl_ms), 0)
        throughput = self._table.tokens_per_s_per_gpu[row][column]
        return DecodePoint(throughput, itls_ms[column], column / (self._columns - 1))

    def _row(self, context_tokens: float) -> int:
        return _nearest(context_tokens, self._table.longest_context_tokens, self._rows)

    def _column(self, concurrency: float, context_tokens: float) -> int:
        return _nearest(concurrency * context_tokens, self._table.max_kv_tokens, self._columns)


def _nearest(value: float, highest: float, points: int) -> int:
    """The nearest of so many points from 0 to ``highest``; of two equally near, the even one."""
    scaled = min(max(value / highest * (points - 1), 0.0), points - 1.0)
    return round(scaled)
