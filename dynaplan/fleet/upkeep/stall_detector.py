"""Standstills: processes that run, and whose heartbeat does not move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynaplan.fleet.heartbeat import Pulse
from dynaplan.util.clock import Clock

LONGEST_STEP_S = 2.0
"""The most that one look adds to a silence, in seconds: a watcher that stood still itself accuses nobody."""


@dataclass
class _Silence:
    beat_s: float
    looked_s: float
    seconds: float = 0.0


class StandstillWatch:
    """Adds up the seconds for which a heartbeat has not moved, while this process went on itself."""

    def __init__(self, read: Callable[[str], Pulse | None], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._silences: dict[str, _Silence] = {}

    def overdue_s(self, name: str, pid: int) -> float:
        """The silence of that process beyond its interval, in seconds; 0 when it has not beaten yet."""
        pulse, now_s = self._read(name), self._clock.now_s()
        if pulse is None or pulse.process.pid != pid:
            self._silences.pop(name, None)
            return 0.0
        silence = self._silences.get(name)
        if silence is None or silence.beat_s != pulse.beat_s:
            silence = self._silences[name] = _Silence(pulse.beat_s, now_s)
        silence.seconds += min(now_s - silence.looked_s, LONGEST_STEP_S)
        silence.looked_s = now_s
        return max(0.0, silence.seconds - pulse.every_s)
