"""A local search: changes of a schedule in one place, kept where they pay on the quick models.

A pool's schedule is a staircase: stretches of windows with the same number of workers, and edges between
them. Levels are filled after every change, and no change may need GPUs that the box lacks. Those tried are

- an edge 1, 2, 4, 8 or 16 windows earlier or later, whole or by one worker;
- a stretch, or a half, third or quarter of it, with one worker less; a whole stretch with one more;
- one worker more for 1, 3 or 6 windows around each of the 8 windows that miss most.

Three kinds of round use them:

- ``sweep`` goes through all changes once and makes each at which GPU-seconds + TTFT price * TTFT misses + ITL
  price * ITL misses falls, by at least ``LEAST_GAIN_S``;
- ``repair`` makes an infeasible schedule feasible: the changes that save the most excess misses for a
  GPU-second first;
- ``squeeze`` spends what is left of the misses that may be: the changes that save most for their part of it
  first.

A change is modelled from its first window through the ``settle_windows`` after its last one, and on until the
misses of a window are what they were before (``FELT_PART``), for at most ``MOST_FELT_WINDOWS`` more. A change
that saves GPU-seconds (drains not counted) is abandoned in between, at the first window after which the
misses that it adds so far, of either target by itself, are more than

    in ``sweep``    ``HOPELESS`` * the GPU-seconds saved / the price of that miss
    in ``squeeze``  the misses that were left to spend when the round began
    in ``repair``   -1: only more workers are looked for, and what saves GPU-seconds must mend both targets

A change that costs GPU-seconds is never abandoned. Gains are exact on the quick models, but for what is below
``FELT_PART``; so the whole schedule is modelled afresh after every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.oracle.dynamic_programme import Prices
from dynaplan.lab.simulate.oracle.pool_models import Misses, MissLog, PoolModel
from dynaplan.lab.simulate.oracle.schedule import Levels, WindowTiming, filled, gpu_seconds, held

MOST_FELT_WINDOWS = 20
"""The most windows that a change is followed beyond those in which it always is (``settle_windows``)."""

FELT_PART = 0.005
"""The part of a window's requests whose misses must change for the window to count as touched by a change."""

HOPELESS = 1.5
"""The multiple of what a change saves that its misses so far may cost, before it is abandoned: more than 1,
because misses in one window are sometimes made good in the next."""

NONE_BEARABLE = Misses(-1, -1)
"""The bearable misses of a change that saves GPU-seconds, in ``repair``: it is abandoned, mostly at its first
window, unless it has saved a miss of each target by then."""

Bearable = Callable[[float], Misses]
"""GPU-seconds that a change saves -> the most misses that it may add before it is abandoned."""

SHIFTS = (1, 2, 4, 8, 16)
"""The numbers of windows by which an edge is moved."""

PARTS = (1, 2, 3, 4)
"""The numbers of equal parts that a stretch is cut into, to take one worker from each."""

WORST_WINDOWS = 8
"""The number of windows with the most misses that one more worker is tried around."""

LEAST_GAIN_S = 0.5
"""The least gain of a change, in GPU-seconds: below it, rounding to looks of a second outweighs it."""

WEIGHTS = {Role.PREFILL: 0.15, Role.DECODE: 1.0}
"""The effort to model a request in a pool: its computing time relative to the decode pool's."""

WINDOW_COST = 8
"""The effort to model an empty window, in requests: the state is copied."""


@dataclass(frozen=True)
class Attempt:
    """One modelled change: the new levels, and the states and misses of the windows that it touches.

    These windows begin with ``start``. ``change`` is the difference of the misses, ``gpu_s`` that of the
    cost.
    """

    levels: Levels
    start: int
    states: list[Any]
    totals: list[Misses]
    change: Misses
    gpu_s: float


class PoolSchedule:
    """One role's part of the schedule, with the state of its model at the beginning of every window.

    ``modelled`` counts the requests that its model has worked through, windows included.
    """

    def __init__(self, model: PoolModel, timing: WindowTiming, first: Sequence[int], levels: Levels) -> None:
        self.model = model
        self.modelled = 0
        self._first = first
        self.timing = timing
        self.levels = filled(levels, timing)
        self.states: list[Any] = []
        self.totals: list[Misses] = []
        self.run()

    def run(self, log: MissLog | None = None) -> None:
        """Model the whole schedule afresh; ``log`` may note the latency of every request."""
        self.states, self.totals = [], []
        self.modelled += self._first[-1] + WINDOW_COST * len(self.levels)
        state = self.model.empty()
        for window, level in enumerate(self.levels):
            self.states.append(self.model.copy(state))
            own = MissLog(ttft_s=log.ttft_s, itl_s=log.itl_s) if log else MissLog()
            self.model.run(state, window, level, own)
            self.totals.append(_misses(own))

    @property
    def total(self) -> Misses:
        """The misses of the whole schedule."""
        return sum(self.totals, Misses())

    def gpu_s(self) -> float:
        """Return the cost of the schedule in GPU-seconds, starts and drains included."""
        return gpu_seconds(self.levels, self.timing) + self.timing.gpus * self.total.drain_s

    def attempt(self, levels: Sequence[int], bearable: Bearable | None = None) -> Attempt | None:
        """Model other levels; None when nothing changes, or too much is missed for what it saves."""
        if levels == self.levels:
            return None
        after = filled(levels, self.timing)
        changed = [window for window, level in enumerate(after) if level != self.levels[window]]
        if not changed:
            return None
        start, settled = changed[0], changed[-1] + 1 + self.model.settle_windows
        gpu_s = gpu_seconds(after, self.timing) - gpu_seconds(self.levels, self.timing)
        state = self.model.copy(self.states[start])
        states, totals, change = [], [], Misses()
        for window in range(start, len(after)):
            if window > start:
                states.append(self.model.copy(state))
            log = MissLog()
            self.model.run(state, window, after[window], log)
            total = _misses(log)
            totals.append(total)
            difference = total - self.totals[window]
            change += difference
            self.modelled += self._first[window + 1] - self._first[window] + WINDOW_COST
            is_felt = abs(difference.ttft) + abs(difference.itl) > FELT_PART * (
                self._first[window + 1] - self._first[window]
            )
            if window >= settled and (not is_felt or window >= settled + MOST_FELT_WINDOWS):
                break
            if bearable and gpu_s < 0 and not fits(change, bearable(-gpu_s)):
                return None
        return Attempt(after, start, states, totals, change, gpu_s + self.timing.gpus * change.drain_s)

    def accept(self, attempt: Attempt) -> None:
        """Take the attempt's levels, states and misses over into the schedule."""
        self.levels = attempt.levels
        start = attempt.start
        self.states[start + 1 : start + 1 + len(attempt.states)] = attempt.states
        self.totals[start : start + len(attempt.totals)] = attempt.totals


def _misses(log: MissLog) -> Misses:
    return Misses(len(log.ttft), len(log.itl), log.drain_s)


class LocalSearch:
    """The schedules of all pools, on one box of GPUs."""

    def __init__(self, pools: Mapping[Role, PoolSchedule], gpus: int) -> None:
        self.pools = pools
        self._gpus = gpus

    @property
    def spent(self) -> float:
        """The effort so far: requests modelled, and ``WINDOW_COST`` for each window, times ``WEIGHTS``."""
        return sum(WEIGHTS[role] * pool.modelled for role, pool in self.pools.items())

    @property
    def total(self) -> Misses:
        """The misses of all pools together."""
        return sum((pool.total for pool in self.pools.values()), Misses())

    @property
    def gpu_s(self) -> float:
        """The cost of all pools together, in GPU-seconds."""
        return sum(pool.gpu_s() for pool in self.pools.values())

    def levels(self) -> dict[Role, Levels]:
        """Return a copy of the schedule as it is now."""
        return {role: pool.levels.copy() for role, pool in self.pools.items()}

    def put(self, levels: Mapping[Role, Levels]) -> None:
        """Take other levels of all roles, and compute their misses from the beginning."""
        for role, pool in self.pools.items():
            pool.levels = filled(levels[role], pool.timing)
        self.run()

    def run(self) -> None:
        """Model the whole schedule afresh: gains that were added up change by change are nearly exact."""
        for pool in self.pools.values():
            pool.run()

    def sweep(self, prices: Prices, until: float) -> int:
        """Try every change once, make it if it pays at these prices, and return the number made.

        It ends early when ``spent`` reaches ``until``.
        """
        made = 0

        def bearable(saved_s: float) -> Misses:
            return Misses(int(HOPELESS * saved_s / prices.ttft), int(HOPELESS * saved_s / prices.itl))

        for role, pool in self.pools.items():
            for levels in _changes(pool):
                if self.spent > until:
                    return made
                attempt = self._attempt(role, levels, bearable)
                if attempt and attempt.gpu_s + prices.cost(attempt.change) < -LEAST_GAIN_S:
                    pool.accept(attempt)
                    made += 1
        return made

    def squeeze(self, allowed: Misses, until: float) -> int:
        """Save GPU-seconds while no more requests miss than allowed; the number of changes made."""
        left = allowed - self.total

        def worth(attempt: Attempt) -> float:
            return _use(attempt.change, allowed) / -attempt.gpu_s

        made = 0
        for role, edit in self._offers(
            lambda attempt: attempt.gpu_s < -LEAST_GAIN_S, worth, lambda _: left, until
        ):
            attempt = self._again(role, edit)
            if attempt and attempt.gpu_s < -LEAST_GAIN_S and fits(self.total + attempt.change, allowed):
                self.pools[role].accept(attempt)
                made += 1
        return made

    def repair(self, allowed: Misses, until: float) -> None:
        """Add workers until no more requests miss than allowed, where a GPU-second saves most."""
        excess = _excess(self.total, allowed)

        def saves(attempt: Attempt) -> int:
            return excess - _excess(self.total + attempt.change, allowed)

        def worth(attempt: Attempt) -> float:
            return attempt.gpu_s / saves(attempt)

        for role, edit in self._offers(
            lambda attempt: saves(attempt) > 0, worth, lambda _: NONE_BEARABLE, until
        ):
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
        """Return the changes that are good each by itself, the lowest ``worth`` first, as edits of
        windows."""
        offers: list[tuple[float, int, Role, dict[int, int]]] = []
        for role, pool in self.pools.items():
            for levels in _changes(pool):
                attempt = self._attempt(role, levels, bearable) if self.spent < until else None
                if attempt and is_good(attempt):
                    offers.append((worth(attempt), len(offers), role, _edit(pool.levels, attempt)))
        return [(role, edit) for _, _, role, edit in sorted(offers, key=lambda offer: offer[:2])]

    def _again(self, role: Role, edit: Mapping[int, int]) -> Attempt | None:
        """Model an edit once more, after others have been made."""
        levels = [level + edit.get(window, 0) for window, level in enumerate(self.pools[role].levels)]
        return self._attempt(role, levels) if min(levels) >= 1 else None

    def _attempt(self, role: Role, levels: Sequence[int], bearable: Bearable | None = None) -> Attempt | None:
        attempt = self.pools[role].attempt(levels, bearable)
        return attempt if attempt and self._has_room(role, attempt) else None

    def _has_room(self, role: Role, attempt: Attempt) -> bool:
        """Tell whether the box has the GPUs for a change, starting workers included, wherever it takes
        more."""
        own = self.pools[role]
        others = [pool for other, pool in self.pools.items() if other is not role]
        reach = int(own.timing.startup_s // own.timing.width_s) + 2
        first = max(0, attempt.start - reach)
        for window in range(first, attempt.start + len(attempt.totals)):
            gpus = held(attempt.levels, window, own.timing) * own.timing.gpus
            if gpus <= held(own.levels, window, own.timing) * own.timing.gpus:
                continue
            gpus += sum(held(pool.levels, window, pool.timing) * pool.timing.gpus for pool in others)
            if gpus > self._gpus:
                return False
        return True


def fits(total: Misses, allowed: Misses) -> bool:
    """Tell whether no more requests miss than are allowed to."""
    return total.ttft <= allowed.ttft and total.itl <= allowed.itl


def _excess(total: Misses, allowed: Misses) -> int:
    return max(0, total.ttft - allowed.ttft) + max(0, total.itl - allowed.itl)


def _use(change: Misses, allowed: Misses) -> float:
    """Return the parts of the allowed misses of TTFT and of ITL that a change takes, added up."""
    return max(0, change.ttft) / max(1, allowed.ttft) + max(0, change.itl) / max(1, allowed.itl)


def _edit(before: Sequence[int], attempt: Attempt) -> dict[int, int]:
    """Return the change as differences by window, which can be made again after others."""
    return {
        window: level - before[window]
        for window, level in enumerate(attempt.levels)
        if level != before[window]
    }


def _changes(pool: PoolSchedule) -> Iterator[Levels]:
    """Yield the levels of every change; each of the schedule as it is by then."""
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


def _shifted(pool: PoolSchedule, edge: int) -> Iterator[Levels]:
    """Yield the levels with the edge earlier and later: the whole of it, and one worker of it."""
    for windows in SHIFTS:
        for start, end, source in ((edge - windows, edge, edge), (edge, edge + windows, edge - 1)):
            start, end = max(0, start), min(len(pool.levels), end)
            level = pool.levels[source]
            yield [level if start <= w < end else own for w, own in enumerate(pool.levels)]
            step = 1 if level > pool.levels[edge if source < edge else edge - 1] else -1
            yield _with(pool.levels, start, end, step)


def _raised(pool: PoolSchedule) -> Iterator[Levels]:
    """Yield the levels with one worker more where most requests miss."""
    misses = [total.ttft + total.itl for total in pool.totals]
    worst = sorted(range(len(misses)), key=lambda window: -misses[window])[:WORST_WINDOWS]
    for window in worst:
        if misses[window]:
            for before, after in ((0, 1), (2, 1), (4, 2)):
                yield _with(pool.levels, max(0, window - before), window + after, 1)


def _with(levels: Sequence[int], start: int, end: int, change: int) -> Levels:
    return [max(1, level + change) if start <= w < end else level for w, level in enumerate(levels)]
