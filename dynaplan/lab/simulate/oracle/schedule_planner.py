"""Plans schedules on the quick models alone: static ones, a first one by prices, and its improvement.

Prices. The misses that a pool makes in the cheapest schedule fall as the price of a miss rises. So the least
price at which no more than the allowed requests miss is found by bisection on its logarithm, for TTFT and for
ITL in turns, twice each: the targets influence each other through requests that wait to decode and so miss
TTFT. Were numbers of workers divisible, a saved GPU-second would cost as many misses in every window then,
the condition of a minimum. As they are whole, the misses fall in jumps as a price rises, and jump past M: the
schedules in between are the cheapest at no price (the gap of Everett's method). The bisection takes the
side with at most M misses, and the misses that are left over are spent by ``LocalSearch.squeeze``.

Improvement. The local search sweeps at these prices, and after each sweep both are raised (too many misses)
or lowered (fewer than allowed) by a factor that begins at 2 and shrinks towards 1.05. The best schedule of
all sweeps is kept: the least excess of misses first, then the least GPU-seconds. It is squeezed last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.oracle.dynamic_programme import MissTable, Prices, cheapest_levels, miss_table
from dynaplan.lab.simulate.oracle.local_search import WINDOW_COST, LocalSearch, PoolSchedule, fits
from dynaplan.lab.simulate.oracle.pool_models import (
    DecodeModel,
    LatencyLimits,
    Misses,
    MissLog,
    PoolModel,
    PrefillModel,
)
from dynaplan.lab.simulate.oracle.prompt_costs import PromptCosts
from dynaplan.lab.simulate.oracle.schedule import Levels, WindowTiming, held
from dynaplan.lab.simulate.oracle.trace_arrays import TraceArrays
from dynaplan.simulation.service import ServiceSettings

LOWEST_PRICE = 1e-4
"""The lowest price, in GPU-seconds for a request that is saved from missing a target: next to nothing."""

HIGHEST_PRICE = 1e4
"""The highest price, in the same unit: three GPU-hours for one request."""

PRICE_STEPS = 20
"""The number of bisections of a price: after 20 it is known to 0.002 %."""

PRICE_TURNS = 2
"""The number of times that each target's price is found, the other's being fixed."""

CAP_ROUNDS = 6
"""The most times that windows are capped, because both pools together want more GPUs than there are. A window
that still wants too many then stays so: the local search makes no change that takes more there."""

DRAIN_WINDOWS = 2
"""The windows that a decode worker is taken to need to leave, in the dynamic programme, which charges them at
its start; the local search models the leaving."""

FIRST_STEP = 2.0
"""The factor on the prices after the first sweep."""

LEAST_STEP = 1.05
"""The factor that later ones shrink to: smaller ones change next to no decision."""

STEP_POWER = 0.7
"""The power by which each factor follows from the one before: 2, 1.62, 1.4, 1.27, 1.18 ..."""

SETTLED_STEP = 1.25
"""The factor below which the search ends at the first sweep that makes no change."""

Schedules = Mapping[Role, Levels]
"""The schedule of every role."""


@dataclass(frozen=True)
class StaticSchedule:
    """The same workers all the time: the misses by the models, and the GPUs."""

    missed: Misses
    gpus: int
    levels: Schedules


class SchedulePlanner:
    """Plans without simulating. ``limits`` are those of the models, which the caller tunes by simulations."""

    def __init__(self, arrays: TraceArrays, settings: ServiceSettings, costs: PromptCosts) -> None:
        slo = settings.slo
        self.arrays = arrays
        self.limits = LatencyLimits(slo.ttft_ms / 1000, slo.itl_ms / 1000)
        self._gpus = settings.gpus
        roles = tuple(settings.engines)
        self.models: dict[Role, PoolModel] = {Role.DECODE: DecodeModel(arrays, settings, self.limits, costs)}
        if Role.PREFILL in roles:
            self.models[Role.PREFILL] = PrefillModel(arrays, settings, self.limits, costs)
        widths = settings.gpus_per_worker
        self.timings = {
            role: WindowTiming(
                arrays.width_s, arrays.windows, arrays.end_s, widths[role], settings.startup_s[role]
            )
            for role in self.models
        }
        least = sum(widths[role] for role in self.models)
        self._most = {role: 1 + max(0, settings.gpus - least) // widths[role] for role in self.models}
        self._reach = max(int(each.startup_s // each.width_s) for each in self.timings.values())
        self._prices = Prices(1.0, 1.0)
        self._search: LocalSearch | None = None

    def statics(self) -> list[StaticSchedule]:
        """Return every static schedule that fits the GPUs, with its misses by the models."""
        misses = {role: self._static_misses(role) for role in self.models}
        found = []
        for workers in self._splits():
            gpus = sum(workers[role] * self.timings[role].gpus for role in workers)
            missed = sum((misses[role][workers[role] - 1] for role in workers), Misses())
            levels = {role: [number] * self.arrays.windows for role, number in workers.items()}
            found.append(StaticSchedule(missed, gpus, levels))
        return found

    def _splits(self) -> Iterator[dict[Role, int]]:
        widths = {role: self.timings[role].gpus for role in self.models}
        for decode in range(1, self._most[Role.DECODE] + 1):
            if Role.PREFILL not in self.models:
                yield {Role.DECODE: decode}
                continue
            room = (self._gpus - decode * widths[Role.DECODE]) // widths[Role.PREFILL]
            for prefill in range(1, max(1, room) + 1):
                yield {Role.DECODE: decode, Role.PREFILL: prefill}

    def _static_misses(self, role: Role) -> list[Misses]:
        totals: list[Misses] = []
        for level in range(1, self._most[role] + 1):
            if len(totals) > 1 and totals[-1] == totals[-2]:  # nothing gets better any more
                totals.append(totals[-1])
            else:
                totals.append(self._pool(role, [level] * self.arrays.windows).total)
        return totals

    def _pool(self, role: Role, levels: Levels) -> PoolSchedule:
        return PoolSchedule(self.models[role], self.timings[role], self.arrays.first, levels)

    # -- a first schedule ------------------------------------------------------------------------

    def begin(self, allowed: Misses) -> None:
        """Make the first schedule: the cheapest that misses no more than allowed, by the tables of the
        windows."""
        tables = {
            role: miss_table(model, self.arrays, self._most[role]) for role, model in self.models.items()
        }
        caps = {role: [self._most[role]] * self.arrays.windows for role in self.models}
        levels = self._path(tables, caps, allowed)
        for _ in range(CAP_ROUNDS):
            if not self._cap(tables, caps, levels):
                break
            levels = self._path(tables, caps, allowed)
        self._search = LocalSearch({role: self._pool(role, levels[role]) for role in self.models}, self._gpus)

    def _path(
        self, tables: Mapping[Role, MissTable], caps: Mapping[Role, Levels], allowed: Misses
    ) -> Schedules:
        """Find the prices, and return the cheapest schedule at them."""
        for _ in range(PRICE_TURNS):
            for name in ("ttft", "itl"):
                low, high = LOWEST_PRICE, HIGHEST_PRICE
                for _ in range(PRICE_STEPS):
                    middle = (low * high) ** 0.5
                    self._prices = replace(self._prices, **{name: middle})
                    _, missed = self._paths(tables, caps)
                    if getattr(missed, name) > getattr(allowed, name):
                        low = middle
                    else:
                        high = middle
                self._prices = replace(self._prices, **{name: high})
        return self._paths(tables, caps)[0]

    def _paths(
        self, tables: Mapping[Role, MissTable], caps: Mapping[Role, Levels]
    ) -> tuple[Schedules, Misses]:
        levels, missed = {}, Misses()
        for role, table in tables.items():
            drain_s = DRAIN_WINDOWS * self.arrays.width_s if role is Role.DECODE else 0.0
            levels[role], own = cheapest_levels(table, self.timings[role], self._prices, caps[role], drain_s)
            missed += own
        return levels, missed

    def _cap(self, tables: Mapping[Role, MissTable], caps: dict[Role, Levels], levels: Schedules) -> bool:
        """Cap windows in which the pools want more GPUs than there are; tell whether there are any.

        The caps of such a window are the split of the GPUs whose misses cost least at the prices.
        """
        is_over = False
        for window in range(self.arrays.windows):
            gpus = sum(
                held(each, window, self.timings[role]) * self.timings[role].gpus
                for role, each in levels.items()
            )
            if gpus <= self._gpus:
                continue
            is_over = True
            best = min(self._splits(), key=lambda split: self._misses_cost(tables, split, window))
            for each in range(window, min(window + self._reach + 1, self.arrays.windows)):
                for role, number in best.items():
                    caps[role][each] = min(caps[role][each], number)
        return is_over

    def _misses_cost(self, tables: Mapping[Role, MissTable], split: Mapping[Role, int], window: int) -> float:
        cost = 0.0
        for role, number in split.items():
            ttft, itl = tables[role][window][number - 1]
            cost += self._prices.cost(Misses(ttft, itl))
        return cost

    # -- improving it ----------------------------------------------------------------------------

    def improve(self, start: Schedules | None, allowed: Misses, effort: float) -> Schedules:
        """Return the cheapest schedule found that misses no more than allowed, or else misses least.

        ``effort`` is the largest number of passes before the last squeeze, which may take as many again. A
        pass is as many requests modelled in the decode pool as ``whole``: the servable ones, and
        ``WINDOW_COST`` for each window.
        """
        search = self._search
        assert search is not None
        if start:
            search.put(start)
        whole = len(self.arrays.arrival_s) + WINDOW_COST * self.arrays.windows
        until = search.spent + effort * whole
        best: _Found = _rank(search, allowed), search.levels()
        if not fits(search.total, allowed):
            search.repair(allowed, until)
            search.run()
            best = min(best, (_rank(search, allowed), search.levels()), key=_first)
        step = FIRST_STEP
        while search.spent < until:
            made = search.sweep(self._prices, until)
            search.run()
            best = min(best, (_rank(search, allowed), search.levels()), key=_first)
            if not made and step < SETTLED_STEP:
                break
            self._reprice(search.total, allowed, step)
            step = max(LEAST_STEP, step**STEP_POWER)
        return self._squeezed(search, best, allowed, search.spent + effort * whole)

    def _squeezed(self, search: LocalSearch, best: _Found, allowed: Misses, until: float) -> Schedules:
        """Spend the misses that are left: at one price for all they are used in lumps, and some remain.

        Changes do not quite add up, so where too many requests miss in the end, it is done again with that
        many fewer to spend.
        """
        margin = Misses()
        while True:
            search.put(best[1])
            while search.squeeze(allowed - margin, until):
                search.run()
                best = min(best, (_rank(search, allowed), search.levels()), key=_first)
                if not fits(search.total, allowed):
                    break
            over = _over(search.total, allowed)
            if not (over.ttft or over.itl) or search.spent >= until:
                return best[1]
            margin += over

    def _reprice(self, total: Misses, allowed: Misses, step: float) -> None:
        prices = {}
        for name in ("ttft", "itl"):
            price = getattr(self._prices, name)
            is_too_much = getattr(total, name) > getattr(allowed, name)
            prices[name] = min(
                max(price * step if is_too_much else price / step, LOWEST_PRICE), HIGHEST_PRICE
            )
        self._prices = Prices(**prices)

    def time_requests(self, levels: Schedules, log: MissLog) -> int:
        """Note the latencies of every request; return the TTFT misses of requests that waited to decode.

        ``log`` has no TTFT of these. For aggregated workers it has every TTFT, and 0 is returned.
        """
        pools = {role: self._pool(role, own) for role, own in levels.items()}
        for pool in pools.values():
            pool.run(log)
        return pools[Role.DECODE].total.ttft if Role.PREFILL in pools else 0


_Found = tuple[tuple[float, float], Schedules]
"""A schedule and its rank: the excess misses of the worse target, then the cost in GPU-seconds."""


def _first(found: _Found) -> tuple[float, float]:
    return found[0]


def _rank(search: LocalSearch, allowed: Misses) -> tuple[float, float]:
    over = _over(search.total, allowed)
    return float(max(over.ttft, over.itl)), search.gpu_s


def _over(total: Misses, allowed: Misses) -> Misses:
    return Misses(max(0, total.ttft - allowed.ttft), max(0, total.itl - allowed.itl))
