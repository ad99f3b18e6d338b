"""The versions that ``serve`` was of, and the workers that were started by another one."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dynaplan
from dynaplan.fleet.reattach.versions import (
    PACKAGE_VARIABLE,
    SUCCESSOR_FILE,
    VERSION_FILE,
    RunningServe,
    Version,
    check_own_package,
    own_version,
    read_serve,
    take_over,
    write_own,
)
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.process import process_table
from dynaplan.util.errors import DeploymentError

PACKAGE = str(Path(dynaplan.__file__).resolve().parent)
PROGRAM = ("/new/bin/python", "-P", "-m", "dynaplan", "serve")
A, B = Version("1", "/a/python", "/a"), Version("2", "/b/python", "/b")


def test_the_same_version_that_comes_back_keeps_the_moment_since_which_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_own(tmp_path, ["graph"])
    first = read_serve(tmp_path)
    assert first and first.version == own_version()
    write_own(tmp_path, ["graph"])
    assert read_serve(tmp_path) == first
    monkeypatch.setattr(dynaplan, "__version__", "99")
    write_own(tmp_path, ["graph"])
    second = read_serve(tmp_path)
    assert second and second.version.number == "99"
    assert (first.since, second.since) == (0, second.started_at)
    assert [each.name for each in tmp_path.iterdir()] == [VERSION_FILE]


def test_what_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    assert read_serve(tmp_path) is None
    for text in ("{", "[]", '{"pid": 1}', '{"pid": 1, "started_at": 1, "version": {}, "arguments": []}'):
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
    upgraded = RunningServe(1, 30, B, since=20)
    in_order = ["frontend", "decode", "prefill", "planner"]
    assert [each.name for each in upgraded.not_renewed(workers)] == in_order
    assert [each.name for each in upgraded.older(workers)] == ["frontend", "decode", "new", *in_order[2:]]
    assert RunningServe(1, 30, A).not_renewed(workers) == []


def serve_of_before(arguments: tuple[str, ...] = ("graph", "--port", "0")) -> tuple[Any, RunningServe]:
    """A process that stands for ``serve``, and what is written down of it."""
    process = subprocess.Popen(["sleep", "600"])
    started_at = process_table.identify(process.pid)
    assert started_at
    return process, RunningServe(process.pid, started_at, A, arguments=arguments)


def test_the_successor_has_the_new_program_and_the_old_arguments_and_serve_is_killed(tmp_path: Path) -> None:
    process, serve = serve_of_before()
    take_over(tmp_path, serve, PROGRAM, f"modules{os.pathsep}/opt")
    assert process.wait(10) == -signal.SIGKILL
    words = (tmp_path / SUCCESSOR_FILE).read_text().split("\0")
    path = f"{Path.cwd() / 'modules'}{os.pathsep}/opt"
    variables = [f"{PACKAGE_VARIABLE}={PACKAGE}", f"PYTHONPATH={path}"]
    assert words == ["env", *variables, *PROGRAM, "graph", "--port", "0"]
    assert (tmp_path / SUCCESSOR_FILE).stat().st_mode & 0o777 == 0o600


def test_a_process_that_is_another_by_now_is_not_killed_and_nothing_is_left_for_it(tmp_path: Path) -> None:
    process, serve = serve_of_before()
    try:
        with pytest.raises(ProcessLookupError):
            take_over(tmp_path, replace(serve, started_at=serve.started_at - 1), PROGRAM, None)
        assert process.poll() is None
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_a_package_that_was_not_meant_does_not_take_over() -> None:
    meant = {PACKAGE_VARIABLE: PACKAGE}
    check_own_package(meant, is_trial=True)
    assert meant == {}
    check_own_package({PACKAGE_VARIABLE: "/other"}, is_trial=False)
    with pytest.raises(DeploymentError, match="/other is to take over"):
        check_own_package({PACKAGE_VARIABLE: "/other"}, is_trial=True)
