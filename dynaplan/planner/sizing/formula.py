"""Size pools by the formulas of Dynamo's SLA planner, versions 0.7 to 0.9 (``sizing: formula``).

Source: Dynamo's "SLA Planner" guide and "Planner Design", section "Scaling Algorithm". Everything is a mean
over one adjustment interval; nothing queues, and the TTFT target is ignored.

Symbols: ``rate`` in requests/s; ISL and OSL, mean prompt and answer in tokens; P(ISL) and D(itl, context),
the profile's prefill and decode throughput in tokens/s per GPU (not the D of ``decode_model.py``, which
is a time); g, GPUs of one worker; c_p and c_d, correction factors (below).

    prefill = ceil(rate ISL min(1, c_p) / P(ISL) / g)
    decode  = ceil(rate OSL / D(itl_target / c_d, ISL + OSL/2) / g)

D(itl, context) is the throughput of the fullest measured point whose ITL does not exceed ``itl``, at the
mean context of a request that is half answered.

**Corrections**, measured over expected, replaced (not smoothed) after every interval:

    c_p = TTFT measured / TTFT of a prompt of mean length alone on an engine
    c_d = ITL measured / ITL of the profile at the measured concurrency and the context ISL + OSL/2

The concurrency of one worker is requests/s x duration / workers (Little's law; duration is the whole time
of a request, in seconds). A high c_p comes from queueing, which more workers cure, so only c_p < 1 counts:
cached prefixes make prompts cheaper. A factor that cannot be computed stays as it was.

**Aggregated workers**, which compute prompts and decode: the original has no formula for them (its "Future
Work"; its versions from 1.0 on search over batch sizes). Here it follows from the same quantities. With N
workers a worker spends the part

    s = rate ISL min(1, c_p) / P(ISL) / g / N

of its time on prompts. During that part nobody is decoded, so tokens come at (1 - s) of the decode
throughput, and the time between two of them is 1 / (1 - s) times the profile's. Enough is the smallest N
with

    s < 1   and   rate OSL / N / g <= (1 - s) D((1 - s) itl_target / c_d, ISL + OSL/2)

P is that of an engine of the aggregated worker's size. The expected ITL of c_d is likewise divided by 1 -
s, s being there the measured requests/s of a worker x TTFT of a prompt alone (seconds) x min(1, c_p). Held
against simulated aggregated workers (tests/unit/planner/sizing/test_formula.py) the mean ITL keeps its target
to within a few per cent near the edge between two sizes (``simulate``: 21.3 ms at the median for a target
of 20 ms, at 40 requests/s), with at most a worker to spare: a step's fixed cost is counted twice, for its
prompts and for its decoding.

**Look-ups** have the numbers of Dynamo's interpolators (versions 0.7 to 1.2), without a numerical library.
*Prefill*: cubic splines over the prompt length, a d^3 + b d^2 + c d + e at the distance d from the
breakpoint below (in the original ``scipy.interpolate.interp1d(kind="cubic")``). A length outside of the
measured range counts as its nearest end.

*Decode*: a grid of 100 x 100 points over context and KV usage (in the original ``griddata``), of which
the nearest point is read. KV usage = concurrency x context / KV cache, clipped to 0..1; of two equally near
points the one with the even index is read, as numpy rounds.

Wrong by up to half a cell of the grid: at a context of 1000 tokens neighbouring points are 9 requests
apart. The queueing model reads the measured points with straight lines between them instead.

**Where it is wrong.** Means hide heavy tails and bursts; without queues a pool at 100 % counts as enough;
the grid of the profile is 1 % of KV usage wide. Where the original fails, this does not: no traffic is no
demand, missing data changes nothing, a profile of zeros corrects nothing, and no budget is exceeded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.model import Corrections, DecisionStep, Expected, Sizing, WorkerLimits
from dynaplan.planner.sizing.limits import MAX_WORKERS, find_smallest, within_limits

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
    """ITL by concurrency and context, and the best throughput, from the nearest points of the grid."""

    __slots__ = ("_columns", "_rows", "_table")

    def __init__(self, table: DecodeTable) -> None:
        self._table = table
        self._rows = len(table.itl_ms)
        self._columns = len(table.itl_ms[0])

    def itl_ms(self, concurrency: float, context_tokens: float) -> float:
        """Return the ITL in ms with ``concurrency`` requests of that mean context in the engine."""
        return self._table.itl_ms[self._row(context_tokens)][self._column(concurrency, context_tokens)]

    def find_best_throughput_per_gpu(self, itl_ms: float, context_tokens: float) -> DecodePoint:
        """Return the fullest point whose ITL does not exceed ``itl_ms``; the emptiest when there is none.

        Fullest by KV usage, as in Dynamo's planner: where throughput falls again, a less full point would be
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


@dataclass(frozen=True)
class Formula:
    """The formulas over the tables of a profile.

    ``aggregated_prefill`` reads the prompts' part of the profile of an engine of the decode workers' size:
    aggregated workers are of that size.
    """

    prefill: PrefillInterpolator
    decode: DecodeInterpolator
    aggregated_prefill: PrefillInterpolator

    @classmethod
    def from_tables(cls, prefill: ProfileTables, decode: ProfileTables) -> Formula:
        """Build from the profile of the prefill workers' engine and that of the decode workers' engine."""
        return cls(
            PrefillInterpolator(prefill.prefill),
            DecodeInterpolator(decode.decode),
            PrefillInterpolator(decode.prefill),
        )

    def corrections(
        self, before: Corrections, traffic: Traffic, decode_workers: int, *, is_aggregated: bool = False
    ) -> tuple[Corrections, str]:
        """Return the factors after an interval, and why; a factor that cannot be computed stays as it was."""
        isl, osl = _number(traffic.isl_tokens), _number(traffic.osl_tokens)
        requests, duration_ms = _number(traffic.requests), _number(traffic.duration_ms)
        if not requests or isl is None or osl is None:
            why = (
                "there were no requests" if requests == 0 else traffic.missing or "something was not measured"
            )
            return before, f"corrections stay at {_describe(before)}: {why}"
        after, ttft_ms, itl_ms = before, _number(traffic.ttft_ms), _number(traffic.itl_ms)
        alone_ms = (self.aggregated_prefill if is_aggregated else self.prefill).ttft_ms(isl)
        if ttft_ms is not None and alone_ms > 0:
            after = replace(after, prefill=ttft_ms / alone_ms)
        if itl_ms is not None and duration_ms is not None and decode_workers > 0:
            concurrency = requests / decode_workers * duration_ms / 1000 / traffic.interval_s
            prefill_share = 0.0
            if is_aggregated:
                rate = requests / decode_workers / traffic.interval_s
                prefill_share = rate * alone_ms / 1000 * min(1.0, after.prefill)
            decode_ms = self.decode.itl_ms(concurrency, isl + osl / 2)
            if decode_ms > 0 and prefill_share < 1:
                after = replace(after, decode=itl_ms * (1 - prefill_share) / decode_ms)
        return after, f"measured over expected: {_describe(after)}"

    def size(
        self,
        expected: Expected,
        interval_s: float,
        targets: SlaTargets,
        corrections: Corrections,
        limits: WorkerLimits,
        current: PoolSizes,
    ) -> Sizing:
        """Return the workers that the next interval needs within the limits, and why.

        A service without prefill workers (``current``) is aggregated.
        """
        requests = _number(expected.requests)
        isl, osl = _number(expected.isl_tokens), _number(expected.osl_tokens)
        if requests == 0:
            step = DecisionStep("demand", current, PoolSizes(), "no requests are expected: no demand")
            allowed, bounds = within_limits(PoolSizes(), limits, current)
            return Sizing(allowed, (step, *bounds))
        if requests is None or isl is None or osl is None or isl + osl <= 0:
            why = "no data: change nothing, because no requests or lengths could be forecast"
            return Sizing(current, (DecisionStep("demand", current, current, why),))
        load = _MeanLoad(requests / interval_s, isl, osl, targets, corrections)
        prefill, why_prefill = (0, "") if not current.prefill else self._prefill_workers(load, limits)
        decode, why_decode = (
            self._decode_workers(load, limits) if current.prefill else self._aggregated_workers(load, limits)
        )
        if prefill is None or decode is None:
            reasons = "; ".join(filter(None, (why_prefill, why_decode)))
            why = f"the profile promises nothing here: change nothing ({reasons})"
            return Sizing(current, (DecisionStep("profile", current, current, why),))
        between, wanted = PoolSizes(prefill, current.decode), PoolSizes(prefill, decode)
        steps = [DecisionStep("prefill", current, between, why_prefill)] if current.prefill else []
        steps.append(DecisionStep("decode", between, wanted, why_decode))
        allowed, bounds = within_limits(wanted, limits, current)
        return Sizing(allowed, (*steps, *bounds))

    def _prefill_workers(self, load: _MeanLoad, limits: WorkerLimits) -> tuple[int | None, str]:
        throughput = self.prefill.tokens_per_s_per_gpu(load.isl_tokens)
        why = f"{load.prompt_tokens_per_s:.0f} prompt tokens/s at {throughput:.0f} tokens/s for each GPU"
        if throughput <= 0:
            return None, why
        return math.ceil(load.prompt_tokens_per_s / throughput / limits.prefill_gpus), why

    def _decode_workers(self, load: _MeanLoad, limits: WorkerLimits) -> tuple[int | None, str]:
        best = self._fullest_point(load, 0.0)
        why = load.decode_in_words(best, 0.0)
        if best.tokens_per_s_per_gpu <= 0:
            return None, why
        needed_gpus = load.answer_tokens_per_s / best.tokens_per_s_per_gpu
        return math.ceil(needed_gpus / limits.decode_gpus), why

    def _aggregated_workers(self, load: _MeanLoad, limits: WorkerLimits) -> tuple[int | None, str]:
        throughput = self.aggregated_prefill.tokens_per_s_per_gpu(load.isl_tokens)
        why = f"{load.prompt_tokens_per_s:.0f} prompt tokens/s at {throughput:.0f} tokens/s for each GPU"
        if throughput <= 0 or self._fullest_point(load, 0.0).tokens_per_s_per_gpu <= 0:
            return None, why
        busy = load.prompt_tokens_per_s / throughput / limits.decode_gpus

        def is_enough(workers: int) -> bool:
            share = busy / workers
            if share >= 1:
                return False
            able = (1 - share) * self._fullest_point(load, share).tokens_per_s_per_gpu
            return load.answer_tokens_per_s / workers / limits.decode_gpus <= able

        workers = find_smallest(is_enough, max(1, math.ceil(min(busy, MAX_WORKERS))))
        share = min(busy / workers, 1.0)
        decode = load.decode_in_words(self._fullest_point(load, share), share)
        return workers, f"{why}, {share:.0%} of the time; {decode}"

    def _fullest_point(self, load: _MeanLoad, prefill_share: float) -> DecodePoint:
        """Return the fullest point of the profile's grid that keeps the ITL target.

        The ITL grows by the share of its time (0 to 1) in which the worker computes prompts.
        """
        itl_ms = (1 - prefill_share) * load.itl_ms
        return self.decode.find_best_throughput_per_gpu(itl_ms, load.context_tokens)


@dataclass(frozen=True)
class _MeanLoad:
    """The expected means of an interval, with the targets and the corrections."""

    requests_per_s: float
    isl_tokens: float
    osl_tokens: float
    targets: SlaTargets
    corrections: Corrections

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens per second, without the cached ones (a prefill correction below 1)."""
        return self.requests_per_s * self.isl_tokens * min(1.0, self.corrections.prefill)

    @property
    def answer_tokens_per_s(self) -> float:
        """Tokens of answers that all decode workers together must compute in a second."""
        return self.requests_per_s * self.osl_tokens

    @property
    def context_tokens(self) -> float:
        """Mean context of a request that is being decoded: its prompt and half of its answer."""
        return self.isl_tokens + self.osl_tokens / 2

    @property
    def itl_ms(self) -> float:
        """ITL to look up in the profile: the target over the correction; a correction of 0 says nothing."""
        factor = self.corrections.decode
        return self.targets.itl_ms / factor if factor > 0 else self.targets.itl_ms

    def decode_in_words(self, best: DecodePoint, prefill_share: float) -> str:
        """Say what the answers need, and what the profile's point gives."""
        itl_ms = (1 - prefill_share) * self.itl_ms
        return (
            f"{self.answer_tokens_per_s:.0f} tokens/s at {best.tokens_per_s_per_gpu:.0f} tokens/s"
            f" for each GPU, ITL {best.itl_ms:.3g} ms for {itl_ms:.3g}, KV usage {best.kv_usage:.2f}"
        )


def _number(value: float | None) -> float | None:
    """Return the value, or None when it is missing, negative or not finite."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def _describe(corrections: Corrections) -> str:
    return f"TTFT {corrections.prefill:.3g}, ITL {corrections.decode:.3g}"
