"""The options of ``dynaplan scale`` that hold, and a hold in words."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dynaplan.cli.scaling import holding
from dynaplan.cli.scaling.holding import asked_hold, described, made_here
from dynaplan.fleet.holds import Hold
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import ConfigError


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding.time, "time", lambda: 1795348800.0)


def test_without_options_nothing_is_held() -> None:
    assert asked_hold(False, None, None, None) is None


def test_a_hold_tells_its_maker_and_its_deadline() -> None:
    asked = asked_hold(False, "2h", None, None)
    assert asked
    made = asked.made
    assert (made.since_s, made.until_s, made.uid, made.pid) == (
        1795348800.0,
        1795356000.0,
        os.getuid(),
        os.getpid(),
    )
    assert made.by
    assert made.host
    assert made.until.startswith("2026-11-2")
    assert Hold.from_json({**made.__dict__}) == made
    assert made_here(None).until_s is None


@pytest.mark.parametrize(
    "options", [(True, None, None, None), (True, "2h", None, None), (False, None, 0, None)]
)
def test_each_option_holds(options: Any) -> None:
    assert asked_hold(*options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((True, None, 2, None), "--at-least and --at-most bound it"),
        ((False, None, 3, 2), "no number is both"),
        ((False, None, 99999, None), "The most is 10000"),
        ((False, "2", None, None), "For example 90s, 10m, 2h or 1d"),
        ((False, "0s", None, None), "up to a year"),
        ((False, "367d", None, None), "up to a year"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_answered(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked_hold(*options)


def test_a_user_without_a_name_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding.os, "getuid", lambda: 4_000_000)
    assert made_here(None).by == "uid 4000000"


def test_a_hold_is_described_with_its_maker_its_end_and_the_way_out() -> None:
    hold = Hold(3, 3, 0.0, 1795356000.0, "2026-11-22 14:00:00 +0000", "alice", 1000, 4711, "box")
    assert described(Role.DECODE, hold, 1795348800.0) == (
        "decode is held at 3 by alice (uid 1000, pid 4711 on box) until 2026-11-22 14:00:00 +0000 "
        "(2:00:00 left), or until `dynaplan release decode`"
    )
    assert described(Role.PREFILL, Hold(2), 0.0) == (
        "prefill is held at 2 or more until `dynaplan release prefill`"
    )
    assert "which is over" in described(Role.DECODE, hold, 1795356000.0)
