"""What frontends on one port count of keys together."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.gateway.keys.counts import KeyCounts
from dynaplan.gateway.keys.limits import Used


class Clock:
    def __init__(self) -> None:
        self.unix_s = 600.0

    def __call__(self) -> float:
        return self.unix_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_minute_becomes_the_one_before_and_then_nothing(clock: Clock) -> None:
    counts = KeyCounts(None, clock)
    counts.add("alice", in_flight=1, requests=1, tokens=7)
    counts.add("alice", requests=1)
    assert counts.used("alice") == Used(1, 2, 0, 7, 0)
    clock.unix_s += 60
    assert counts.used("alice") == Used(1, 0, 2, 0, 7)
    counts.add("alice", requests=1)
    assert counts.used("alice") == Used(1, 1, 2, 0, 7)
    clock.unix_s += 120
    assert counts.used("alice") == Used(1)
    counts.add("alice", in_flight=-1)
    assert counts.used("alice") == Used()
    assert counts.used("bob") == Used()


def test_what_was_estimated_too_high_in_an_earlier_minute_lifts_no_limit(clock: Clock) -> None:
    counts = KeyCounts(None, clock)
    counts.add("alice", tokens=1000)
    counts.add("alice", tokens=-400)
    assert counts.used("alice").tokens_now == 600
    clock.unix_s += 60
    counts.add("alice", tokens=100 - 600)
    assert counts.used("alice") == Used(0, 0, 0, 0, 600)


def test_frontends_on_one_port_see_each_others_counts(tmp_path: Path, clock: Clock) -> None:
    first, second = KeyCounts(tmp_path, clock), KeyCounts(tmp_path, clock)
    first.look_for_others()
    for each in ("alice", "bob"):
        second.add(each, in_flight=1, requests=2, tokens=10)
    first.add("bob", in_flight=1, requests=1)
    assert first.used("bob") == second.used("bob") == Used(2, 3, 0, 10, 0)
    assert first.used("alice") == Used(1, 2, 0, 10, 0)
    second.add("carol", in_flight=1)  # who came after the last look
    assert first.used("carol") == Used(1)
    for one in (first, second):
        one.close()


def test_a_frontend_that_died_holds_no_request(tmp_path: Path, clock: Clock) -> None:
    first, second, third = (KeyCounts(tmp_path, clock) for _ in range(3))
    second.add("alice", in_flight=5)
    for each in (first, third):
        each.look_for_others()
        assert each.used("alice") == Used(5)
    second.close()  # the kernel does that for a process that ends
    for each in (first, third):  # the first of them removes its file
        each.look_for_others()
        assert each.used("alice") == Used()
    assert len(list(tmp_path.iterdir())) == 2
    for each in (first, third):
        each.close()
