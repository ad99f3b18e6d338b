"""A heartbeat says in words what is wrong with its process, and nothing when all is well."""

from __future__ import annotations

import pytest

from dynaplan.fleet.heartbeats import Heartbeat
from dynaplan.process.identity import ProcessIdentity


@pytest.mark.parametrize(
    ("silent_s", "is_alive", "words"),
    [
        (0.0, True, ""),
        (10.9, True, ""),
        (40.2, True, "the fleet plugin (pid 7) has not answered for 40 s"),
        (40.2, False, "the fleet plugin (pid 7) has ended"),
    ],
)
def test_a_process_is_in_trouble_when_it_is_late_or_dead(silent_s: float, is_alive: bool, words: str) -> None:
    heartbeat = Heartbeat(ProcessIdentity(7, 1, "boot"), 100.0, silent_s, 1.0, is_alive)
    assert heartbeat.trouble("the fleet plugin") == words
    assert heartbeat.is_late == (is_alive and bool(words))
