"""The requests that have ended, against the SLO: counts and distributions, over all and by time of arrival.

Memory does not grow with their number: distributions are counts per bucket (``Distribution``), and time is
cut into at most 240 windows (``Windows``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat, zip_longest
from math import floor, log
from operator import add, truediv

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.traced_requests import TracedRequest

PRECISION = 0.01
"""The largest relative error of a percentile that comes out of a ``Distribution``."""

_GROWTH = math.log1p(2 * PRECISION)
"""The logarithm of the ratio between neighbouring buckets: their middle is within ``PRECISION`` of every
value."""

_ZERO = -(10**9)
"""The bucket of the value 0, below all others."""


MAX_UNCOUNTED = 64
"""The values of a distribution that wait until they are counted at once, which costs less than one by one."""


class Distribution:
    """A distribution of values, none negative, as counts in buckets that grow geometrically.

    Percentiles are within ``PRECISION``; ``count``, ``total`` and ``highest`` are exact.
    """

    __slots__ = ("_count", "_counts", "_highest", "_total", "_uncounted")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._count = 0
        self._total = 0.0
        self._highest = 0.0
        self._uncounted: list[float] = []

    def add(self, value: float) -> None:
        """Add one value."""
        values = self._uncounted
        values.append(value)
        if len(values) >= MAX_UNCOUNTED:
            self.compact()

    @property
    def count(self) -> int:
        return self._count + len(self._uncounted)

    @property
    def total(self) -> float:
        """The sum of the values, in the order in which they came."""
        self.compact()
        return self._total

    @property
    def highest(self) -> float:
        """The largest value; 0 without values."""
        self.compact()
        return self._highest

    def merge(self, other: Distribution) -> None:
        """Count all values of another distribution too."""
        self.compact()
        self._total += other.total
        self._highest = max(self._highest, other.highest)
        self._count += other._count
        self._counts.update(other._counts)

    def compact(self) -> None:
        """Count the values that wait: nothing but memory changes."""
        values = self._uncounted
        if not values:
            return
        self._count += len(values)
        self._total = reduce(add, values, self._total)
        self._highest = max(self._highest, *values)
        positive = [value for value in values if value > 0]
        if len(positive) < len(values):
            self._counts[_ZERO] += len(values) - len(positive)
        self._counts.update(map(floor, map(truediv, map(log, positive), repeat(_GROWTH))))
        values.clear()

    def percentile(self, percent: float) -> float:
        """Return the value that ``percent`` of 100 values do not exceed; 0 without values."""
        self.compact()
        rank = math.ceil(self._count * percent / 100)
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                middle = math.exp((bucket + 0.5) * _GROWTH) if bucket != _ZERO else 0.0
                return min(middle, self._highest)
        return 0.0


def merged(distributions: Iterable[Distribution]) -> Distribution:
    """Return one distribution with the values of all."""
    whole = Distribution()
    for each in distributions:
        whole.merge(each)
    return whole


@dataclass(frozen=True)
class Slo:
    """The service level objective of a request: the largest TTFT and mean ITL, both in ms.

    The mean ITL of a request is the time from its first to its last token over its output tokens less one.
    """

    ttft_ms: float = 500.0
    itl_ms: float = 50.0


@dataclass(slots=True)
class Window:
    """The requests that arrived in one stretch of time; in the end, those not ``answered`` are lost."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    answered: int = 0
    both_met: int = 0
    ttft_ms: Distribution = field(default_factory=Distribution)
    itl_ms: Distribution = field(default_factory=Distribution)

    def arrive(self, traced: TracedRequest) -> None:
        """Count an arrived request, with its tokens of prompt and answer."""
        self.requests += 1
        self.prompt_tokens += traced.prompt_tokens
        self.output_tokens += traced.output_tokens

    def merge(self, other: Window) -> Window:
        """Add the other window's counts and distributions to this one; return self."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.answered += other.answered
        self.both_met += other.both_met
        self.ttft_ms.merge(other.ttft_ms)
        self.itl_ms.merge(other.itl_ms)
        return self


class Windows:
    """The time since the beginning in windows of equal length, in seconds: 1 at first.

    The length doubles, and neighbours merge, each time that there would be more than ``MAX_COUNT``.
    """

    MAX_COUNT = 240
    """The largest number of windows: a step is then about 4 px wide in a chart."""

    def __init__(self) -> None:
        self.width_s = 1.0
        self._windows: list[Window] = []

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows)

    def of(self, at_s: float) -> Window:
        index = int(at_s / self.width_s)
        if index >= len(self._windows):
            index = self._grow(at_s)
        return self._windows[index]

    def _grow(self, at_s: float) -> int:
        """Make the windows until that moment, and return the index of its own."""
        while at_s >= self.MAX_COUNT * self.width_s:
            pairs = zip_longest(self._windows[::2], self._windows[1::2])
            self._windows = [one.merge(other) if other else one for one, other in pairs]
            self.width_s *= 2
        index = int(at_s / self.width_s)
        if self._windows:  # the last one is over
            self._windows[-1].ttft_ms.compact()
            self._windows[-1].itl_ms.compact()
        self._windows += [Window() for _ in range(len(self._windows), index + 1)]
        return index


@dataclass
class Outcome:
    """The requests that have ended, against an SLO.

    A request of one output token has no ITL and meets that target. ``lost`` is the number never answered: no
    engine could serve them, the frontends refused them, or they were left at the end. ``hashed_tokens`` are
    those of answered prompts whose prefixes the trace has, ``cached_tokens`` the part of them that no
    engine computed. ``by_worker`` counts the answers of each decode worker, ``given_up_prefills`` the
    prompts that waited too long for a prefill worker; ``total_duration_s`` sums the times to the last tokens.
    """

    slo: Slo
    requests: int = 0
    lost: int = 0
    ttft_met: int = 0
    itl_met: int = 0
    both_met: int = 0
    output_tokens: int = 0
    remote_prefills: int = 0
    given_up_prefills: int = 0
    hashed_tokens: int = 0
    cached_tokens: int = 0
    by_worker: Counter[int] = field(default_factory=Counter)
    queued_ms: Distribution = field(default_factory=Distribution)
    total_duration_s: float = 0.0
    windows: Windows = field(default_factory=Windows)

    def add(
        self,
        arrival_s: float,
        ttft_s: float,
        itl_s: float | None,
        duration_s: float,
        output_tokens: int,
        queued_s: float | None = None,
    ) -> None:
        """Count a request of that arrival that has been answered; all times in seconds.

        ``queued_s`` is the time until an engine had the prompt, where that is known.
        """
        ttft_ms = ttft_s * 1000
        self.requests += 1
        self.output_tokens += output_tokens
        window = self.windows.of(arrival_s)
        window.answered += 1
        window.ttft_ms.add(ttft_ms)
        self.total_duration_s += duration_s
        if queued_s is not None:
            self.queued_ms.add(queued_s * 1000)
        is_ttft_met, is_itl_met = ttft_ms <= self.slo.ttft_ms, True
        if itl_s is not None:
            itl_ms = itl_s * 1000
            window.itl_ms.add(itl_ms)
            is_itl_met = itl_ms <= self.slo.itl_ms
        self.ttft_met += is_ttft_met
        self.itl_met += is_itl_met
        if is_ttft_met and is_itl_met:
            self.both_met += 1
            window.both_met += 1

    def note_hits(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count an answered prompt, and the part of it that came out of a cache."""
        self.hashed_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    @property
    def ttft_ms(self) -> Distribution:
        """The TTFTs of the requests of all windows."""
        return merged(each.ttft_ms for each in self.windows)

    @property
    def itl_ms(self) -> Distribution:
        """The mean ITLs of the requests of all windows."""
        return merged(each.itl_ms for each in self.windows)

    @property
    def hit_rate(self) -> float | None:
        """The part of the prompts' tokens that came out of a cache; None where no trace has prefixes."""
        return self.cached_tokens / self.hashed_tokens if self.hashed_tokens else None

    @property
    def imbalance(self) -> float:
        """The answers of the busiest decode worker over the mean of all that answered; 1 is balanced."""
        counts = self.by_worker.values()
        return max(counts) * len(counts) / sum(counts) if counts else 1.0

    def attainment(self, met: int) -> float:
        """Return ``met`` as a part of all requests, lost ones included; 1 when there are none."""
        everything = self.requests + self.lost
        return met / everything if everything else 1.0

    def keeps(self, promise: SlaTargets) -> bool:
        """Tell whether as many per cent of all requests as promised met each target.

        Lost requests meet none. The targets are those of ``slo``, not the promise's own.
        """
        shares = (self.ttft_met, promise.ttft_percentile), (self.itl_met, promise.itl_percentile)
        return all(self.attainment(met) >= percentile / 100 for met, percentile in shares)
