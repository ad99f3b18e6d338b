"""The first schedule of the oracle: what each window would miss at each level, and the cheapest way through.

Windows are looked at in blocks, each warmed up at its own level: what it owes to those before is left out
here, and found by the search that comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.simulator.oracle.pools import PoolModel, Seen, Total
from dynaplan.simulator.oracle.requests import Requests
from dynaplan.simulator.oracle.schedule import Levels, Timing

BLOCK_WINDOWS = 6
HOPELESS = 0.6
"""A level at which more of a block's requests miss is taken to serve none, and no lower one is tried."""


@dataclass(frozen=True)
class Prices:
    """What a request that misses a target may cost to be saved, in GPU seconds."""

    ttft: float
    itl: float

    def of(self, change: Total) -> float:
        """What so many more misses cost."""
        return self.ttft * change.ttft + self.itl * change.itl


Table = list[list[tuple[int, int]]]
"""For each window and level (from 1): how many of its requests miss the TTFT target, and the ITL target."""


def table_of(model: PoolModel, requests: Requests, most: int) -> Table:
    """What every window misses at every level up to ``most``."""
    table: Table = []
    guess = 1
    for block in range(0, requests.windows, BLOCK_WINDOWS):
        end = min(block + BLOCK_WINDOWS, requests.windows)
        rows, guess = _block(model, requests, block, end, most, guess)
        table += rows
    return table


def _block(
    model: PoolModel, requests: Requests, start: int, end: int, most: int, guess: int
) -> tuple[Table, int]:
    """The rows of one block, and the level at which nothing misses; tried around the guess."""
    arrivals = [requests.first[each + 1] - requests.first[each] for each in range(start, end)]
    tried: dict[int, list[tuple[int, int]]] = {}
    enough, before = guess, None
    while enough not in tried:
        rows = tried[enough] = _misses(model, requests, start, end, enough)
        if any(max(row) for row in rows) and rows != before and enough < most:
            enough, before = enough + 1, rows
    level = min(guess, enough) - 1
    while level >= 1 and sum(max(row) for row in tried[level + 1]) < HOPELESS * sum(arrivals):
        tried[level] = _misses(model, requests, start, end, level)
        level -= 1
    # levels between the guess and enough were tried on the way; below is hopeless, above is no better
    table: Table = []
    for index, arrived in enumerate(arrivals):
        worst, best = (arrived, arrived), tried[enough][index]
        row = [worst if level < min(tried) else best for level in range(1, most + 1)]
        for level, rows in tried.items():
            row[level - 1] = rows[index]
        for level in range(most - 2, -1, -1):  # more workers are never taken to be worse
            row[level] = max(row[level][0], row[level + 1][0]), max(row[level][1], row[level + 1][1])
        table.append(row)
    fewer = [level for level, rows in tried.items() if not any(max(row) for row in rows)]
    return table, min(fewer, default=enough)


def _misses(model: PoolModel, requests: Requests, start: int, end: int, level: int) -> list[tuple[int, int]]:
    state, seen = model.empty(), Seen()
    before = max(0, start - model.settle_windows - 1)
    after = min(requests.windows, end + model.settle_windows)
    for window in range(before, after):
        model.run(state, window, level, seen)
    ttft, itl = [0] * requests.windows, [0] * requests.windows
    for number in seen.ttft:
        ttft[requests.window_of(number)] += 1
    for number in seen.itl:
        itl[requests.window_of(number)] += 1
    return list(zip(ttft[start:end], itl[start:end], strict=True))


def cheapest(
    table: Table, timing: Timing, prices: Prices, caps: Sequence[int], drain_s: float
) -> tuple[Levels, Total]:
    """The levels of least cost at these prices, none over its window's cap, and what they miss.

    A level costs its GPU seconds, a rise the start of the workers, and later the drain.
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
    return levels, Total(ttft, itl)


def _sources(costs: Sequence[float], count: int, rise_s: float) -> tuple[list[int], list[float]]:
    """For each level the one to come from, and what that costs: falling is free, each worker more a rise."""
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
