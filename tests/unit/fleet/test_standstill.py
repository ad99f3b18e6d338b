"""A heartbeat that does not move is a standstill, unless the watcher stood still itself."""

from __future__ import annotations

from dynaplan.fleet.plugin.stall_detection import StallDetector
from dynaplan.process.heartbeats import Heartbeat
from dynaplan.process.identity import ProcessIdentity
from tests.fakes.clock import ManualClock


class Box:
    def __init__(self) -> None:
        self.clock, self.pid, self.beat_s = ManualClock(), 7, 1000.0
        self.watch = StallDetector(self, self.clock)

    def read(self, name: str) -> Heartbeat | None:
        process = ProcessIdentity(self.pid, 1, "boot")
        return Heartbeat(process, self.beat_s, 0.0, 1.0, True) if self.beat_s else None

    def after(self, seconds: float, every_s: float = 1.0) -> float:
        """Look at that interval; the silence at the end."""
        end_s = self.clock.now_s() + seconds
        while self.clock.now_s() < end_s:
            self.clock.advance(every_s)
            overdue_s = self.watch.overdue_s("fleet-plugin", 7)
        return overdue_s


def test_silence_beyond_the_interval_adds_up_until_the_next_beat() -> None:
    box = Box()
    assert box.after(1) == 0.0
    assert box.after(30) == 29.0
    box.beat_s += 1
    assert box.after(1) == 0.0


def test_a_watcher_that_stood_still_itself_counts_two_seconds_of_it() -> None:
    box = Box()
    box.after(1)
    assert box.after(3600, every_s=3600) == 1.0


def test_the_beat_of_an_earlier_process_accuses_nobody() -> None:
    box = Box()
    box.pid = 6
    assert box.after(60) == 0.0


def test_a_process_that_has_never_beaten_is_not_judged() -> None:
    box = Box()
    box.beat_s = 0.0
    assert box.after(60) == 0.0
