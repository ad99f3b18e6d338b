"""What the oracle decides about: how many workers serve in each window, and when to start them for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.targets import Targets
from dynaplan.simulator.service import SimulatedService

LOOK_S = 1.0
"""A schedule is carried out to the second."""

Levels = list[int]
"""The workers that serve, for each window."""


@dataclass(frozen=True)
class Timing:
    """The windows, and what a worker of one role costs: its GPUs and the seconds of its start."""

    width_s: int
    windows: int
    end_s: float
    gpus: int
    startup_s: float

    def seconds(self, window: int) -> float:
        """How long a window is: the last one ends with the trace."""
        return min(float(self.width_s), self.end_s - window * self.width_s)

    def start_s(self, window: int) -> float:
        """How long before its first window a worker must be started; not before the trace begins."""
        return min(self.startup_s, float(window * self.width_s))


def filled(levels: Sequence[int], timing: Timing) -> Levels:
    """The same, with gaps filled that are no longer than a start: to leave and come back saves nothing there.

    Before the trace nothing can be started, so what serves within a start of its beginning serves from it.
    """
    reach = int(timing.startup_s // timing.width_s)
    if not reach:
        return list(levels)
    wanted = [max(levels[window : window + reach + 1]) for window in range(len(levels))]
    return [min(wanted[max(0, window - reach) : window + 1]) for window in range(len(levels))]


def gpu_seconds(levels: Sequence[int], timing: Timing) -> float:
    """What filled levels cost, starts included."""
    total_s, before = 0.0, levels[0]
    for window, level in enumerate(levels):
        total_s += level * timing.seconds(window)
        if level > before:
            total_s += (level - before) * timing.start_s(window)
        before = level
    return total_s * timing.gpus


def held(levels: Sequence[int], window: int, timing: Timing) -> int:
    """The workers that serve or start in a window."""
    ahead = math.ceil(timing.startup_s / timing.width_s)
    return max(levels[window : window + ahead + 1])


def schedule(
    levels: Mapping[Role, Sequence[int]], timings: Mapping[Role, Timing]
) -> list[tuple[float, Targets]]:
    """When to want how many workers so that these serve; the first entry, at 0, is what to begin with."""
    changes = {role: list(_changes(levels[role], timings[role])) for role in levels}
    moments = sorted({at_s for each in changes.values() for at_s, _ in each})
    entries: list[tuple[float, Targets]] = []
    for at_s in moments:
        wanted = {role: _at(changes[role], at_s) for role in changes}
        targets = Targets(wanted.get(Role.PREFILL, 0), wanted.get(Role.DECODE, 0))
        if not entries or targets != entries[-1][1]:
            entries.append((at_s, targets))
    return entries


def _changes(levels: Sequence[int], timing: Timing) -> Iterator[tuple[float, int]]:
    """The moments at which the wanted number may change, and the number from then on."""
    edges = {0.0}
    for window in range(1, len(levels)):
        at_s = float(window * timing.width_s)
        if levels[window] > levels[window - 1]:
            edges.add(_started_s(at_s, timing))
        elif levels[window] < levels[window - 1]:
            edges.add(at_s)
    for at_s in sorted(edges):
        yield at_s, _wanted(levels, at_s, timing)


def _started_s(at_s: float, timing: Timing) -> float:
    """When to start what serves from then on, on the grid of looks."""
    return max(0.0, math.floor((at_s - timing.startup_s) / LOOK_S) * LOOK_S)


def _wanted(levels: Sequence[int], at_s: float, timing: Timing) -> int:
    """Who serves now, or must be starting now."""
    window = min(int(at_s // timing.width_s), len(levels) - 1)
    most = levels[window]
    for later in range(window + 1, len(levels)):
        if _started_s(float(later * timing.width_s), timing) > at_s:
            break
        most = max(most, levels[later])
    return most


def _at(changes: Sequence[tuple[float, int]], at_s: float) -> int:
    return next(wanted for moment, wanted in reversed(changes) if moment <= at_s)


class SchedulePolicy:
    """Wants given numbers of workers from given moments on, whatever happens; moments are whole seconds."""

    every_s = LOOK_S

    def __init__(self, name: str, entries: Sequence[tuple[float, Targets]]) -> None:
        self.name = name
        self._entries = entries
        self._next = 0

    def begin(self, service: SimulatedService) -> None:
        """The service has started with the first entry's workers."""
        self._next = 1

    def look(self, service: SimulatedService) -> None:
        """Want what is due; workers that leave are gone as soon as they have answered."""
        service.advance_decoders(service.now_s)
        while self._next < len(self._entries) and self._entries[self._next][0] <= service.now_s:
            service.want(self._entries[self._next][1])
            self._next += 1
