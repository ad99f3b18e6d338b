"""Plans a schedule on the quick models: the static ones, a first path through the windows, and its search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dynaplan.domain.lifecycle import Role
from dynaplan.simulator.oracle.path import Prices, Table, cheapest, table_of
from dynaplan.simulator.oracle.pools import DecodeModel, Limits, PoolModel, PrefillModel, Seen, Total
from dynaplan.simulator.oracle.requests import Requests
from dynaplan.simulator.oracle.schedule import Levels, Timing, held
from dynaplan.simulator.oracle.search import WINDOW_COST, Pool, Search, fits
from dynaplan.simulator.service import ServiceSettings

LOWEST_PRICE, HIGHEST_PRICE = 1e-4, 1e4
"""GPU seconds for a request that is saved from missing."""
PRICE_STEPS = 20
ROUNDS = 6
"""How often prices are set anew, at most, before a schedule is simulated."""

LEAST_STEP = 1.25
"""Prices are doubled or halved first, then changed by less and less; so near to 1 they are found."""

Schedules = Mapping[Role, Levels]


@dataclass(frozen=True)
class Static:
    """The same workers all the time: what that misses, by the models, and its GPUs."""

    missed: Total
    gpus: int
    levels: Schedules


class Planner:
    """Everything that is tried without a simulation. ``limits`` are tuned by whoever simulates."""

    def __init__(self, requests: Requests, settings: ServiceSettings) -> None:
        slo = settings.slo
        self.requests = requests
        self.limits = Limits(slo.ttft_ms / 1000, slo.itl_ms / 1000)
        self._gpus = settings.gpus
        roles = tuple(settings.engines)
        self.models: dict[Role, PoolModel] = {Role.DECODE: DecodeModel(requests, settings, self.limits)}
        if Role.PREFILL in roles:
            self.models[Role.PREFILL] = PrefillModel(requests, settings, self.limits)
        widths = settings.gpus_per_worker
        self.timings = {
            role: Timing(
                requests.width_s, requests.windows, requests.end_s, widths[role], settings.startup_s[role]
            )
            for role in self.models
        }
        least = sum(widths[role] for role in self.models)
        self._most = {role: 1 + max(0, settings.gpus - least) // widths[role] for role in self.models}
        self._reach = max(int(each.startup_s // each.width_s) for each in self.timings.values())
        self._prices = Prices(1.0, 1.0)
        self._search: Search | None = None

    def statics(self) -> list[Static]:
        """Every static schedule that the box has room for."""
        misses = {role: self._static_misses(role) for role in self.models}
        found = []
        for workers in self._splits():
            gpus = sum(workers[role] * self.timings[role].gpus for role in workers)
            missed = sum((misses[role][workers[role] - 1] for role in workers), Total())
            levels = {role: [number] * self.requests.windows for role, number in workers.items()}
            found.append(Static(missed, gpus, levels))
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

    def _static_misses(self, role: Role) -> list[Total]:
        totals: list[Total] = []
        for level in range(1, self._most[role] + 1):
            if len(totals) > 1 and totals[-1] == totals[-2]:  # nothing gets better any more
                totals.append(totals[-1])
            else:
                totals.append(self._pool(role, [level] * self.requests.windows).total)
        return totals

    def _pool(self, role: Role, levels: Levels) -> Pool:
        return Pool(self.models[role], self.timings[role], self.requests.first, levels)

    # -- a first schedule ------------------------------------------------------------------------

    def begin(self, allowed: Total) -> None:
        """The cheapest path through the windows that misses no more than allowed, as far as windows tell."""
        tables = {
            role: table_of(model, self.requests, self._most[role]) for role, model in self.models.items()
        }
        caps = {role: [self._most[role]] * self.requests.windows for role in self.models}
        levels = self._path(tables, caps, allowed)
        for _ in range(ROUNDS):
            if not self._cap(tables, caps, levels):
                break
            levels = self._path(tables, caps, allowed)
        self._search = Search({role: self._pool(role, levels[role]) for role in self.models}, self._gpus)

    def _path(self, tables: Mapping[Role, Table], caps: Mapping[Role, Levels], allowed: Total) -> Schedules:
        """Prices by bisection, the one for TTFT and the one for ITL in turns; then the path at these."""
        for _ in range(2):
            for name in ("ttft", "itl"):
                low, high = LOWEST_PRICE, HIGHEST_PRICE
                for _ in range(PRICE_STEPS):
                    middle = (low * high) ** 0.5
                    self._prices = replace(self._prices, **{name: middle})
                    _, total = self._paths(tables, caps)
                    if getattr(total, name) > getattr(allowed, name):
                        low = middle
                    else:
                        high = middle
                self._prices = replace(self._prices, **{name: high})
        return self._paths(tables, caps)[0]

    def _paths(self, tables: Mapping[Role, Table], caps: Mapping[Role, Levels]) -> tuple[Schedules, Total]:
        levels, total = {}, Total()
        for role, table in tables.items():
            drain_s = 2 * self.requests.width_s if role is Role.DECODE else 0.0
            levels[role], missed = cheapest(table, self.timings[role], self._prices, caps[role], drain_s)
            total += missed
        return levels, total

    def _cap(self, tables: Mapping[Role, Table], caps: dict[Role, Levels], levels: Schedules) -> bool:
        """Where both together want more GPUs than there are, the cheapest split; whether there was."""
        is_over = False
        for window in range(self.requests.windows):
            gpus = sum(
                held(each, window, self.timings[role]) * self.timings[role].gpus
                for role, each in levels.items()
            )
            if gpus <= self._gpus:
                continue
            is_over = True
            best = min(self._splits(), key=lambda split: self._misses_cost(tables, split, window))
            for each in range(window, min(window + self._reach + 1, self.requests.windows)):
                for role, number in best.items():
                    caps[role][each] = min(caps[role][each], number)
        return is_over

    def _misses_cost(self, tables: Mapping[Role, Table], split: Mapping[Role, int], window: int) -> float:
        cost = 0.0
        for role, number in split.items():
            ttft, itl = tables[role][window][number - 1]
            cost += self._prices.of(Total(ttft, itl))
        return cost

    # -- improving it ----------------------------------------------------------------------------

    def improve(
        self, start: Schedules | None, allowed: Total, effort: float, shake: float = 1.0
    ) -> Schedules:
        """The cheapest schedule found that misses no more than allowed by the models, or misses least.

        ``effort`` is how many times the whole trace may be modelled. With a ``shake`` it begins elsewhere:
        where misses cost so many times as much.
        """
        search = self._search
        assert search is not None
        if start:
            search.put(start)
        whole = len(self.requests.arrival_s) + WINDOW_COST * self.requests.windows
        until = search.spent + effort * whole
        best: _Found = _rank(search, allowed), search.levels()
        if not fits(search.total, allowed):
            search.repair(allowed, until)
            search.run()
            best = min(best, (_rank(search, allowed), search.levels()), key=_first)
        if shake != 1:
            search.sweep(Prices(shake * self._prices.ttft, shake * self._prices.itl), until)
        step = 2.0
        while search.spent < until:
            made = search.sweep(self._prices, until)
            search.run()
            best = min(best, (_rank(search, allowed), search.levels()), key=_first)
            if not made and step < LEAST_STEP:
                break
            self._reprice(search.total, allowed, step)
            step = max(1.05, step**0.7)
        return self._squeezed(search, best, allowed, search.spent + effort * whole)

    def _squeezed(self, search: Search, best: _Found, allowed: Total, until: float) -> Schedules:
        """What is left of what may miss used up, where one price for all cannot: it comes in lumps.

        Changes do not quite add up, so when too much misses it is done again with so much less to spend.
        """
        margin = Total()
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

    def _reprice(self, total: Total, allowed: Total, step: float) -> None:
        prices = {}
        for name in ("ttft", "itl"):
            price = getattr(self._prices, name)
            is_too_much = getattr(total, name) > getattr(allowed, name)
            prices[name] = min(
                max(price * step if is_too_much else price / step, LOWEST_PRICE), HIGHEST_PRICE
            )
        self._prices = Prices(**prices)

    def noted(self, levels: Schedules, seen: Seen) -> int:
        """Note the time of every request under a schedule; how many TTFTs decode workers spoiled by waiting.

        An aggregated worker's TTFTs are all noted, and spoil nothing besides.
        """
        pools = {role: self._pool(role, own) for role, own in levels.items()}
        for pool in pools.values():
            pool.run(seen)
        return pools[Role.DECODE].total.ttft if Role.PREFILL in pools else 0


_Found = tuple[tuple[float, float], Schedules]
"""A schedule behind its rank: by how much the worse target is missed too often, then what it costs."""


def _first(found: _Found) -> tuple[float, float]:
    return found[0]


def _rank(search: Search, allowed: Total) -> tuple[float, float]:
    over = _over(search.total, allowed)
    return float(max(over.ttft, over.itl)), search.gpu_s


def _over(total: Total, allowed: Total) -> Total:
    return Total(max(0, total.ttft - allowed.ttft), max(0, total.itl - allowed.itl))
