"""Schedules: the numbers of workers that serve in each window, and the moments to ask for them.

``Levels`` are the numbers for one role, n(0) ... n(W - 1). To serve from window w on, a worker is asked for
one start-up time before it, rounded down to a whole second. A worker that leaves and is needed again within a
start-up time would hold its GPUs all the same, so such gaps are ``filled`` first: then every rise is a start,
every fall a leave, and the package's objective is what the schedule costs (``gpu_seconds``), but for drains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.service import SimulatedService

LOOK_S = 1.0
"""The seconds between two looks of a schedule at the clock: what it asks for is rounded down to them."""

Levels = list[int]
"""The number of workers of one role that serve in each window."""


@dataclass(frozen=True)
class WindowTiming:
    """The windows of a trace, ``width_s`` long until ``end_s``; the GPUs and start-up of one role's
    worker."""

    width_s: int
    windows: int
    end_s: float
    gpus: int
    startup_s: float

    def seconds(self, window: int) -> float:
        """Return the length of a window in seconds: the last one ends with the trace."""
        return min(float(self.width_s), self.end_s - window * self.width_s)

    def start_s(self, window: int) -> float:
        """Return the seconds before its first window that a worker is started; not before the trace begins.

        On filled levels a rise is never within the first start-up time, so this is ``startup_s`` there.
        """
        return min(self.startup_s, float(window * self.width_s))


def filled(levels: Sequence[int], timing: WindowTiming) -> Levels:
    """Return the levels without gaps of at most a start-up time: to leave and come back saves nothing there.

    Before the trace nothing can be started, so a worker that serves within the first start-up time serves
    from the beginning.
    """
    reach = int(timing.startup_s // timing.width_s)
    if not reach:
        return list(levels)
    wanted = [max(levels[window : window + reach + 1]) for window in range(len(levels))]
    return [min(wanted[max(0, window - reach) : window + 1]) for window in range(len(levels))]


def gpu_seconds(levels: Sequence[int], timing: WindowTiming) -> float:
    """Return the GPU-seconds of filled levels, starts included and drains not."""
    total_s, before = 0.0, levels[0]
    for window, level in enumerate(levels):
        total_s += level * timing.seconds(window)
        if level > before:
            total_s += (level - before) * timing.start_s(window)
        before = level
    return total_s * timing.gpus


def held(levels: Sequence[int], window: int, timing: WindowTiming) -> int:
    """Return the number of workers that serve or start in a window; leaving ones are not counted."""
    ahead = math.ceil(timing.startup_s / timing.width_s)
    return max(levels[window : window + ahead + 1])


def schedule(
    levels: Mapping[Role, Sequence[int]], timings: Mapping[Role, WindowTiming]
) -> list[tuple[float, Targets]]:
    """Return the moments, in seconds, and the workers to ask for at each; the first entry, at 0, is the
    beginning."""
    changes = {role: list(_changes(levels[role], timings[role])) for role in levels}
    moments = sorted({at_s for own in changes.values() for at_s, _ in own})
    entries: list[tuple[float, Targets]] = []
    for at_s in moments:
        wanted = {role: _wanted_at(changes[role], at_s) for role in changes}
        targets = Targets(wanted.get(Role.PREFILL, 0), wanted.get(Role.DECODE, 0))
        if not entries or targets != entries[-1][1]:
            entries.append((at_s, targets))
    return entries


def _changes(levels: Sequence[int], timing: WindowTiming) -> Iterator[tuple[float, int]]:
    """Yield the moments at which the wanted number may change, and the number from then on."""
    edges = {0.0}
    for window in range(1, len(levels)):
        at_s = float(window * timing.width_s)
        if levels[window] > levels[window - 1]:
            edges.add(_started_s(at_s, timing))
        elif levels[window] < levels[window - 1]:
            edges.add(at_s)
    for at_s in sorted(edges):
        yield at_s, _wanted(levels, at_s, timing)


def _started_s(at_s: float, timing: WindowTiming) -> float:
    """Return the look at which a worker is started that serves from ``at_s`` on."""
    return max(0.0, math.floor((at_s - timing.startup_s) / LOOK_S) * LOOK_S)


def _wanted(levels: Sequence[int], at_s: float, timing: WindowTiming) -> int:
    """Return the number of workers that serve at that moment or must be starting by then."""
    window = min(int(at_s // timing.width_s), len(levels) - 1)
    most = levels[window]
    for later in range(window + 1, len(levels)):
        if _started_s(float(later * timing.width_s), timing) > at_s:
            break
        most = max(most, levels[later])
    return most


def _wanted_at(changes: Sequence[tuple[float, int]], at_s: float) -> int:
    return next(wanted for moment, wanted in reversed(changes) if moment <= at_s)


class SchedulePolicy:
    """Asks for given numbers of workers at given moments, which are whole seconds, whatever happens.

    ``on_computed`` is the service's (``SimulatedService.on_computed``).
    """

    every_s = LOOK_S

    def __init__(
        self,
        name: str,
        entries: Sequence[tuple[float, Targets]],
        on_computed: Callable[[int, int], None] | None = None,
    ) -> None:
        self.name = name
        self._entries = entries
        self._on_computed = on_computed
        self._next = 0

    def begin(self, service: SimulatedService) -> None:
        """The service has started with the first entry's workers."""
        self._next = 1
        if self._on_computed:
            service.on_computed = self._on_computed

    def look(self, service: SimulatedService) -> None:
        """Ask for what is due; workers that leave are gone as soon as they have answered."""
        service.advance_decoders(service.now_s)
        while self._next < len(self._entries) and self._entries[self._next][0] <= service.now_s:
            service.want(self._entries[self._next][1])
            self._next += 1
