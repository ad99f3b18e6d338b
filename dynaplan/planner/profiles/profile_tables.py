"""A measured profile as tables that ``sizing: formula`` looks values up in, without a numerical library."""

from __future__ import annotations

from dataclasses import dataclass

Piece = tuple[float, float, float, float]
"""A cubic polynomial from one breakpoint on: the factors of d^3, d^2, d and 1, for the distance d from it."""


@dataclass(frozen=True)
class PrefillTable:
    """TTFT (ms) and throughput (tokens/s per GPU) over the prompt length: cubic splines.

    There is one more breakpoint (tokens, rising) than there are pieces.
    """

    breakpoints_tokens: tuple[float, ...]
    ttft_ms: tuple[Piece, ...]
    tokens_per_s_per_gpu: tuple[Piece, ...]


@dataclass(frozen=True)
class DecodeTable:
    """ITL (ms) and throughput (tokens/s per GPU) on a grid: rows by context, columns by KV usage.

    Both axes are evenly spaced, from 0 to ``longest_context_tokens`` and from 0 to 1.
    """

    longest_context_tokens: float
    max_kv_tokens: int
    itl_ms: tuple[tuple[float, ...], ...]
    tokens_per_s_per_gpu: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ProfileTables:
    """One engine configuration, as the formulas of the SLA planner read it."""

    prefill: PrefillTable
    decode: DecodeTable


@dataclass(frozen=True)
class DecodePoint:
    """The performance of an engine at one point of its decode grid; ``kv_usage`` is from 0 to 1."""

    tokens_per_s_per_gpu: float
    itl_ms: float
    kv_usage: float
