"""Improves a schedule on the quick models: edges shifted, levels raised or lowered, whatever pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dynaplan.domain.lifecycle import Role
from dynaplan.simulator.oracle.path import Prices
from dynaplan.simulator.oracle.pools import PoolModel, Seen, Total
from dynaplan.simulator.oracle.schedule import Levels, Timing, filled, gpu_seconds, held

MOST_FELT_WINDOWS = 20
"""A change is followed at most so many windows beyond the time that it is felt at least."""

FELT = 0.005
HOPELESS = 1.5
"""A change is felt where the misses of a window change by such a part of its requests; it is given up when
the misses so far cost so many times what it saves."""

NOTHING = Total(-1, -1)
Bearable = Callable[[float], Total]
"""What may miss for so many GPU seconds that are saved."""

SHIFTS = (1, 2, 4, 8, 16)
PARTS = (1, 2, 3, 4)
"""By how many windows edges are shifted, and into how many parts a stretch is cut that one worker leaves."""


LEAST_GAIN_S = 0.5
"""GPU seconds: less is not worth a change."""

WEIGHTS = {Role.PREFILL: 0.15, Role.DECODE: 1.0}
WINDOW_COST = 8
"""What modelling a request costs, in requests of the dearer model, and what a window costs besides."""


@dataclass(frozen=True)
class Attempt:
    """One change: the new levels, and what becomes of the windows from ``start`` on, as far as it is felt."""

    levels: Levels
    start: int
    states: list[Any]
    totals: list[Total]
    change: Total
    gpu_s: float


class Pool:
    """One role's part of the schedule, with the state of its model at the beginning of every window.

    ``modelled`` counts the requests that its model has worked through.
    """

    def __init__(self, model: PoolModel, timing: Timing, first: Sequence[int], levels: Levels) -> None:
        self.model = model
        self.modelled = 0
        self._first = first
        self.timing = timing
        self.levels = filled(levels, timing)
        self.states: list[Any] = []
        self.totals: list[Total] = []
        self.run()

    def run(self, seen: Seen | None = None) -> None:
        """Evaluate the whole schedule afresh."""
        self.states, self.totals = [], []
        self.modelled += self._first[-1] + WINDOW_COST * len(self.levels)
        state = self.model.empty()
        for window, level in enumerate(self.levels):
            self.states.append(self.model.copy(state))
            own = Seen(ttft_s=seen.ttft_s, itl_s=seen.itl_s) if seen else Seen()
            self.model.run(state, window, level, own)
            self.totals.append(_total(own))

    @property
    def total(self) -> Total:
        """What the whole schedule misses."""
        return sum(self.totals, Total())

    def gpu_s(self) -> float:
        """What the schedule costs, starts and drains included."""
        return gpu_seconds(self.levels, self.timing) + self.timing.gpus * self.total.drain_s

    def attempt(self, levels: Sequence[int], bearable: Bearable | None = None) -> Attempt | None:
        """What these levels would change; None for no change, or an unbearable one that saves."""
        if levels == self.levels:
            return None
        after = filled(levels, self.timing)
        changed = [window for window, level in enumerate(after) if level != self.levels[window]]
        if not changed:
            return None
        start, settled = changed[0], changed[-1] + 1 + self.model.settle_windows
        gpu_s = gpu_seconds(after, self.timing) - gpu_seconds(self.levels, self.timing)
        state = self.model.copy(self.states[start])
        states, totals, change = [], [], Total()
        for window in range(start, len(after)):
            if window > start:
                states.append(self.model.copy(state))
            seen = Seen()
            self.model.run(state, window, after[window], seen)
            total = _total(seen)
            totals.append(total)
            difference = total - self.totals[window]
            change += difference
            self.modelled += self._first[window + 1] - self._first[window] + WINDOW_COST
            is_felt = abs(difference.ttft) + abs(difference.itl) > FELT * (
                self._first[window + 1] - self._first[window]
            )
            if window >= settled and (not is_felt or window >= settled + MOST_FELT_WINDOWS):
                break
            if bearable and gpu_s < 0 and not fits(change, bearable(-gpu_s)):
                return None
        return Attempt(after, start, states, totals, change, gpu_s + self.timing.gpus * change.drain_s)

    def accept(self, attempt: Attempt) -> None:
        """Make the change."""
        self.levels = attempt.levels
        start = attempt.start
        self.states[start + 1 : start + 1 + len(attempt.states)] = attempt.states
        self.totals[start : start + len(attempt.totals)] = attempt.totals


def _total(seen: Seen) -> Total:
    return Total(len(seen.ttft), len(seen.itl), seen.drain_s)


class Search:
    """Both pools' schedules, on one box of GPUs."""

    def __init__(self, pools: Mapping[Role, Pool], gpus: int) -> None:
        self.pools = pools
        self._gpus = gpus

    @property
    def spent(self) -> float:
        """The requests that were modelled so far, weighted."""
        return sum(WEIGHTS[role] * pool.modelled for role, pool in self.pools.items())

    @property
    def total(self) -> Total:
        """What both together miss."""
        return sum((pool.total for pool in self.pools.values()), Total())

    @property
    def gpu_s(self) -> float:
        """What both together cost."""
        return sum(pool.gpu_s() for pool in self.pools.values())

    def levels(self) -> dict[Role, Levels]:
        """The schedule as it is now."""
        return {role: pool.levels.copy() for role, pool in self.pools.items()}

    def put(self, levels: Mapping[Role, Levels]) -> None:
        """Go on from this schedule."""
        for role, pool in self.pools.items():
            pool.levels = filled(levels[role], pool.timing)
        self.run()

    def run(self) -> None:
        """Evaluate everything afresh: what was tried window by window adds up to nearly that."""
        for pool in self.pools.values():
            pool.run()

    def sweep(self, prices: Prices, until: float) -> int:
        """Try every change once, and make those that pay at these prices; how many were made.

        It ends early when so much has been spent.
        """
        made = 0

        def bearable(saved_s: float) -> Total:
            return Total(int(HOPELESS * saved_s / prices.ttft), int(HOPELESS * saved_s / prices.itl))

        for role, pool in self.pools.items():
            for levels in _changes(pool):
                if self.spent > until:
                    return made
                attempt = self._attempt(role, levels, bearable)
                if attempt and attempt.gpu_s + prices.of(attempt.change) < -LEAST_GAIN_S:
                    pool.accept(attempt)
                    made += 1
        return made

    def squeeze(self, allowed: Total, until: float) -> int:
        """Save what can be saved while no more than that misses, the best saving per miss first."""
        left = allowed - self.total

        def worth(attempt: Attempt) -> float:
            return _use(attempt.change, allowed) / -attempt.gpu_s

        made = 0
        for role, edit in self._offers(lambda each: each.gpu_s < -LEAST_GAIN_S, worth, lambda _: left, until):
            attempt = self._again(role, edit)
            if attempt and attempt.gpu_s < -LEAST_GAIN_S and fits(self.total + attempt.change, allowed):
                self.pools[role].accept(attempt)
                made += 1
        return made

    def repair(self, allowed: Total, until: float) -> None:
        """Spend until no more than that misses, where a GPU second saves most of what misses too much."""
        excess = _excess(self.total, allowed)

        def saves(attempt: Attempt) -> int:
            return excess - _excess(self.total + attempt.change, allowed)

        def worth(attempt: Attempt) -> float:
            return attempt.gpu_s / saves(attempt)

        for role, edit in self._offers(lambda each: saves(each) > 0, worth, lambda _: NOTHING, until):
            if fits(self.total, allowed):
                return
            excess = _excess(self.total, allowed)
            attempt = self._again(role, edit)
            if attempt and saves(attempt) > 0:
                self.pools[role].accept(attempt)

    def _offers(
        self,
        is_good: Callable[[Attempt], bool],
        worth: Callable[[Attempt], float],
        bearable: Bearable,
        until: float,
    ) -> list[tuple[Role, dict[int, int]]]:
        """What would be good each by itself, the lowest worth first, to be made window by window."""
        offers: list[tuple[float, int, Role, dict[int, int]]] = []
        for role, pool in self.pools.items():
            for levels in _changes(pool):
                attempt = self._attempt(role, levels, bearable) if self.spent < until else None
                if attempt and is_good(attempt):
                    offers.append((worth(attempt), len(offers), role, _edit(pool.levels, attempt)))
        return [(role, edit) for _, _, role, edit in sorted(offers, key=lambda offer: offer[:2])]

    def _again(self, role: Role, edit: Mapping[int, int]) -> Attempt | None:
        """An offer once more, where others have been taken since."""
        levels = [level + edit.get(window, 0) for window, level in enumerate(self.pools[role].levels)]
        return self._attempt(role, levels) if min(levels) >= 1 else None

    def _attempt(self, role: Role, levels: Sequence[int], bearable: Bearable | None = None) -> Attempt | None:
        attempt = self.pools[role].attempt(levels, bearable)
        return attempt if attempt and self._has_room(role, attempt) else None

    def _has_room(self, role: Role, attempt: Attempt) -> bool:
        """Whether the box has the GPUs, starting workers included, wherever the change takes more."""
        own = self.pools[role]
        others = [pool for other, pool in self.pools.items() if other is not role]
        reach = int(own.timing.startup_s // own.timing.width_s) + 2
        first = max(0, attempt.start - reach)
        for window in range(first, attempt.start + len(attempt.totals)):
            gpus = held(attempt.levels, window, own.timing) * own.timing.gpus
            if gpus <= held(own.levels, window, own.timing) * own.timing.gpus:
                continue
            gpus += sum(held(each.levels, window, each.timing) * each.timing.gpus for each in others)
            if gpus > self._gpus:
                return False
        return True


def fits(total: Total, allowed: Total) -> bool:
    """Whether no more is missed than is allowed."""
    return total.ttft <= allowed.ttft and total.itl <= allowed.itl


def _excess(total: Total, allowed: Total) -> int:
    return max(0, total.ttft - allowed.ttft) + max(0, total.itl - allowed.itl)


def _use(change: Total, allowed: Total) -> float:
    """The part of what is allowed that a change takes."""
    return max(0, change.ttft) / max(1, allowed.ttft) + max(0, change.itl) / max(1, allowed.itl)


def _edit(before: Sequence[int], attempt: Attempt) -> dict[int, int]:
    """The change window by window, to be made again when others have been made."""
    return {
        window: level - before[window]
        for window, level in enumerate(attempt.levels)
        if level != before[window]
    }


def _changes(pool: Pool) -> Iterator[Levels]:
    """Schedules that differ from the pool's in one place; each from what it is by then."""
    edges = [
        0,
        *(w for w in range(1, len(pool.levels)) if pool.levels[w] != pool.levels[w - 1]),
        len(pool.levels),
    ]
    for edge in edges[1:-1]:
        yield from _shifted(pool, edge)
    for start, end in pairwise(edges):
        for parts in PARTS:
            cuts = [start + (end - start) * part // parts for part in range(parts + 1)]
            for left, right in pairwise(cuts):
                if right > left:
                    yield _with(pool.levels, left, right, -1)
        yield _with(pool.levels, start, end, 1)
    yield from _raised(pool)


def _shifted(pool: Pool, edge: int) -> Iterator[Levels]:
    """The edge earlier and later: the whole of it, and one worker of it."""
    for windows in SHIFTS:
        for start, end, source in ((edge - windows, edge, edge), (edge, edge + windows, edge - 1)):
            start, end = max(0, start), min(len(pool.levels), end)
            level = pool.levels[source]
            yield [level if start <= w < end else each for w, each in enumerate(pool.levels)]
            step = 1 if level > pool.levels[edge if source < edge else edge - 1] else -1
            yield _with(pool.levels, start, end, step)


def _raised(pool: Pool) -> Iterator[Levels]:
    """One worker more where most is missed."""
    misses = [total.ttft + total.itl for total in pool.totals]
    worst = sorted(range(len(misses)), key=lambda window: -misses[window])[:8]
    for window in worst:
        if misses[window]:
            for before, after in ((0, 1), (2, 1), (4, 2)):
                yield _with(pool.levels, max(0, window - before), window + after, 1)


def _with(levels: Sequence[int], start: int, end: int, change: int) -> Levels:
    return [max(1, level + change) if start <= w < end else level for w, level in enumerate(levels)]
