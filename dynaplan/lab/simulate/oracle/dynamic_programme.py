"""The first schedule: a dynamic programme over windows and numbers of workers, with a price for each miss.

For one pool, with the package's symbols without the role (g, s, n(w)); ``price_t`` and ``price_i`` are the
prices, in GPU-seconds, of a request that misses the TTFT target and the ITL target; ``ttft(w, n)`` and
``itl(w, n)`` are the misses among the requests of window w when n workers serve, from the table that
``miss_table`` makes by the quick model; ``drain`` is an estimate of the seconds that a worker takes to leave,
paid at its start. A pool's schedule costs the sum over w of own(w, n(w)), and over w > 0 of
rise(w, n(w - 1), n(w)), with

    own(w, n)     = g * n * length(w) + price_t * ttft(w, n) + price_i * itl(w, n)
    rise(w, k, n) = g * max(0, n - k) * (min(s, begin(w)) + drain)

Each term depends on one window or on two neighbours, so the least is found window by window:

    best(0, n) = own(0, n)
    best(w, n) = own(w, n) + min over k of ( best(w - 1, k) + rise(w, k, n) )

in time proportional to the number of windows times levels: the cost of a rise is linear in n - k, so that the
best k below n is known from the best one below n - 1.

What this leaves out: a gap in the levels of at most s is charged a start, although ``filled`` closes it
afterwards. A window's misses depend on the windows before it (a queue, a batch), but the table is made for
blocks of windows at constant n, each begun some windows earlier at the same n. The local search, which models
every change in its place on filled levels, mends both. The search for prices is ``SchedulePlanner``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.lab.simulate.oracle.pool_models import Misses, MissLog, PoolModel
from dynaplan.lab.simulate.oracle.schedule import Levels, WindowTiming
from dynaplan.lab.simulate.oracle.trace_arrays import TraceArrays

BLOCK_WINDOWS = 6
"""The number of windows modelled together: fewer repeat the run-up to a block more often, more are modelled
at numbers of workers that only some of them need."""

HOPELESS_PART = 0.6
"""The part of a block's requests whose miss makes a number of workers hopeless: no lower one is tried, and at
all below every request is taken to miss."""


@dataclass(frozen=True)
class Prices:
    """The GPU-seconds that one request may cost to be saved from missing the TTFT target, or the ITL target:
    ``price_t`` and ``price_i`` of the module's formulas."""

    ttft: float
    itl: float

    def cost(self, misses: Misses) -> float:
        """Return the GPU-seconds that the misses are worth."""
        return self.ttft * misses.ttft + self.itl * misses.itl


MissTable = list[list[tuple[int, int]]]
"""The requests that miss the TTFT and the ITL target, by window and by number of workers from 1 on."""


def miss_table(model: PoolModel, arrays: TraceArrays, most: int) -> MissTable:
    """Return the misses of every window at every number of workers up to ``most``."""
    table: MissTable = []
    guess = 1
    for block in range(0, arrays.windows, BLOCK_WINDOWS):
        end = min(block + BLOCK_WINDOWS, arrays.windows)
        block_rows, guess = _block(model, arrays, block, end, most, guess)
        table += block_rows
    return table


def _block(
    model: PoolModel, arrays: TraceArrays, start: int, end: int, most: int, guess: int
) -> tuple[MissTable, int]:
    """Return the rows of one block and the least level without a miss, which is tried around the guess."""
    arrivals = [arrays.first[window + 1] - arrays.first[window] for window in range(start, end)]
    tried: dict[int, list[tuple[int, int]]] = {}
    enough, before = guess, None
    while enough not in tried:
        misses = tried[enough] = _misses(model, arrays, start, end, enough)
        if any(max(row) for row in misses) and misses != before and enough < most:
            enough, before = enough + 1, misses
    level = min(guess, enough) - 1
    while level >= 1 and sum(max(row) for row in tried[level + 1]) < HOPELESS_PART * sum(arrivals):
        tried[level] = _misses(model, arrays, start, end, level)
        level -= 1
    # levels between the guess and enough were tried on the way; below is hopeless, above is no better
    table: MissTable = []
    for index, arrived in enumerate(arrivals):
        worst, best = (arrived, arrived), tried[enough][index]
        row = [worst if level < min(tried) else best for level in range(1, most + 1)]
        for level, misses in tried.items():
            row[level - 1] = misses[index]
        for level in range(most - 2, -1, -1):  # more workers are never taken to be worse
            row[level] = max(row[level][0], row[level + 1][0]), max(row[level][1], row[level + 1][1])
        table.append(row)
    fewer = [level for level, misses in tried.items() if not any(max(row) for row in misses)]
    return table, min(fewer, default=enough)


def _misses(model: PoolModel, arrays: TraceArrays, start: int, end: int, level: int) -> list[tuple[int, int]]:
    """Return the misses of each window of a block at a constant level, begun and ended some windows
    beyond."""
    state, log = model.empty(), MissLog()
    before = max(0, start - model.settle_windows - 1)
    after = min(arrays.windows, end + model.settle_windows)
    for window in range(before, after):
        model.run(state, window, level, log)
    ttft, itl = [0] * arrays.windows, [0] * arrays.windows
    for number in log.ttft:
        ttft[arrays.window_of(number)] += 1
    for number in log.itl:
        itl[arrays.window_of(number)] += 1
    return list(zip(ttft[start:end], itl[start:end], strict=True))


def cheapest_levels(
    table: MissTable, timing: WindowTiming, prices: Prices, caps: Sequence[int], drain_s: float
) -> tuple[Levels, Misses]:
    """Return the levels of least cost at these prices, none over its window's cap, and their misses.

    Each rise pays ``drain_s`` seconds too, for the drain that follows some day.
    """
    costs: list[float] = []
    came: list[list[int]] = []
    for window, row in enumerate(table):
        own = [
            timing.gpus * (index + 1) * timing.seconds(window) + prices.ttft * ttft + prices.itl * itl
            for index, (ttft, itl) in enumerate(row[: max(1, caps[window])])
        ]
        rise_s = timing.gpus * (timing.start_s(window) + drain_s) if window else 0.0
        sources, least = (
            _sources(costs, len(own), rise_s) if costs else (list(range(len(own))), [0.0] * len(own))
        )
        costs = [cost + before for cost, before in zip(own, least, strict=True)]
        came.append(sources)
    level = min(range(len(costs)), key=costs.__getitem__)
    levels = [0] * len(table)
    for window in range(len(table) - 1, -1, -1):
        levels[window] = level + 1
        level = came[window][level]
    ttft = sum(row[level - 1][0] for row, level in zip(table, levels, strict=True))
    itl = sum(row[level - 1][1] for row, level in zip(table, levels, strict=True))
    return levels, Misses(ttft, itl)


def _sources(costs: Sequence[float], count: int, rise_s: float) -> tuple[list[int], list[float]]:
    """Return for each of ``count`` levels the level to come from, and its cost; a fall costs nothing."""
    sources, least = [0] * count, [0.0] * count
    best = len(costs) - 1
    for level in range(len(costs) - 1, -1, -1):  # from above, or the same
        if costs[level] <= costs[best]:
            best = level
        if level < count:
            sources[level], least[level] = best, costs[best]
    best, cost = -1, float("inf")
    for level in range(count):  # from below
        if best >= 0:
            cost += rise_s
            if level >= len(costs) or cost < least[level]:
                sources[level], least[level] = best, cost
        if level < len(costs) and costs[level] < cost:
            best, cost = level, costs[level]
    return sources, least
