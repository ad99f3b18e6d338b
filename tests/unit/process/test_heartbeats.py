"""Heartbeats as files: written whole, read by anybody, never an error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynaplan.process.heartbeats import Heartbeat, HeartbeatFiles
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.process_table import identity_of


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [1000.0]
    monkeypatch.setattr("dynaplan.process.heartbeats.time.monotonic", lambda: moment[0])
    return moment


def test_a_beat_tells_its_process_its_interval_and_its_age(tmp_path: Path, now: list[float]) -> None:
    HeartbeatFiles(tmp_path / "beats").beat("serve", 1.0)
    now[0] += 40.0
    heartbeat = HeartbeatFiles(tmp_path / "beats").read("serve")
    assert heartbeat
    assert heartbeat.process == identity_of(os.getpid())
    assert (heartbeat.is_alive, heartbeat.every_s, heartbeat.silent_s, heartbeat.is_late) == (
        True,
        1.0,
        40.0,
        True,
    )
    assert (tmp_path / "beats" / "serve.json").stat().st_mode & 0o777 == 0o600


def test_a_beat_far_before_its_time_is_not_written(tmp_path: Path, now: list[float]) -> None:
    heartbeats = HeartbeatFiles(tmp_path)
    for wait_s, silent_s in ((0.0, 0.0), (0.1, 0.1), (0.6, 0.0)):
        now[0] += wait_s
        heartbeats.beat("serve", 1.0)
        heartbeat = heartbeats.read("serve")
        assert heartbeat
        assert heartbeat.silent_s == pytest.approx(silent_s, abs=0.01)


def test_a_beat_covers_the_one_before_and_a_file_that_was_taken_away_is_made_again(
    tmp_path: Path, now: list[float]
) -> None:
    heartbeats, path = HeartbeatFiles(tmp_path), tmp_path / "serve.json"
    (path).write_text("of a process before this one")
    found = []
    for _ in range(3):
        heartbeats.beat("serve", 1.0)
        heartbeat = heartbeats.read("serve")
        found.append((path.stat().st_ino, heartbeat and heartbeat.silent_s))
        now[0] += 1234.5
    assert [silent_s for _, silent_s in found] == [0.0] * 3
    assert len({inode for inode, _ in found}) == 1
    path.unlink()
    heartbeats.beat("serve", 1.0)
    assert heartbeats.read("serve")


def test_the_beat_of_a_process_that_is_gone_is_dead(tmp_path: Path) -> None:
    heartbeats = HeartbeatFiles(tmp_path)
    heartbeats.beat("serve", 1.0)
    document = json.loads((tmp_path / "serve.json").read_text())
    for change in ({"started_at": document["started_at"] + 1}, {"boot_id": "another"}):
        (tmp_path / "serve.json").write_text(json.dumps({**document, **change}))
        heartbeat = heartbeats.read("serve")
        assert heartbeat
        assert not heartbeat.is_alive


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"pid": "x"}', '{"pid": 1, "beat_s": Infinity}', "[" * 9999]
)
def test_what_cannot_be_read_is_no_pulse(tmp_path: Path, text: str) -> None:
    (tmp_path / "serve.json").write_text(text)
    assert HeartbeatFiles(tmp_path).read("serve") is None


def test_a_directory_that_vanishes_is_made_again_and_one_that_cannot_be_is_no_error(
    tmp_path: Path, now: list[Any]
) -> None:
    heartbeats = HeartbeatFiles(tmp_path / "beats")
    heartbeats.beat("serve", 1.0)
    shutil.rmtree(tmp_path / "beats")
    now[0] += 1
    heartbeats.beat("serve", 1.0)
    assert heartbeats.read("serve")
    HeartbeatFiles(tmp_path / "no" / "parent").beat("serve", 1.0)


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
