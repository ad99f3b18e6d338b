"""The versions that ``serve`` was of, and the workers that were started by another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dynaplan
from dynaplan.fleet.reattach.versions import (
    VERSION_FILE,
    RunningServe,
    Takeover,
    Version,
    own_version,
    read_serve,
    write_own,
)
from dynaplan.graph.lifecycle import Role, Worker, WorkerState

A, B = Version("1", "/a/python", "/a"), Version("2", "/b/python", "/b")


def test_the_same_version_that_comes_back_keeps_the_moment_since_which_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_own(tmp_path)
    first = read_serve(tmp_path)
    assert first and first.version == own_version()
    write_own(tmp_path)
    assert read_serve(tmp_path) == first
    monkeypatch.setattr(dynaplan, "__version__", "99")
    write_own(tmp_path)
    second = read_serve(tmp_path)
    assert second and second.version.number == "99"
    assert second.takeovers[:1] == first.takeovers
    assert [each.name for each in tmp_path.iterdir()] == [VERSION_FILE]


def test_what_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    assert read_serve(tmp_path) is None
    for text in ("{", "[]", '{"pid": 1}', '{"pid": 1, "started_at": 1, "takeovers": []}'):
        (tmp_path / VERSION_FILE).write_text(text)
        assert read_serve(tmp_path) is None


def test_workers_of_another_version_are_renewed_frontends_first_and_those_that_leave_are_not() -> None:
    def started(name: str, role: Role, at: int, pid: int = 7, **more: Any) -> Worker:
        return Worker(name, name, role, pid=pid, started_at=at, **more)

    workers = (
        started("planner", Role.PLANNER, 10),
        started("prefill", Role.PREFILL, 10),
        started("decode", Role.DECODE, 10),
        started("new", Role.DECODE, 25),
        started("crashed", Role.DECODE, 0, pid=0),
        started("leaving", Role.DECODE, 10, state=WorkerState.DRAINING),
        started("frontend", Role.FRONTEND, 10),
    )
    upgraded = RunningServe(1, 30, (Takeover(A, 5), Takeover(B, 20)))
    in_order = ["frontend", "decode", "prefill", "planner"]
    assert [each.name for each in upgraded.not_renewed(workers)] == in_order
    assert [each.name for each in upgraded.older(workers)] == ["frontend", "decode", "new", *in_order[2:]]
    back = RunningServe(1, 30, (*upgraded.takeovers, Takeover(A, 30)))
    assert [each.name for each in back.not_renewed(workers)] == ["new"]
    assert RunningServe(1, 30, (Takeover(A, 30),)).not_renewed(workers) == []
