"""The end of real processes that were left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dynaplan.fleet.preparation import end_leftovers
from dynaplan.fleet.rules.statefile import Document
from dynaplan.process import process_table as processes
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.kernel import isolated_command
from dynaplan.process.process_table import (
    TRACKERS_TIMEOUT_S,
    boot_id,
    descendants_of,
    group_members,
    identify,
    identity_of,
    kill_group,
    session_members,
)
from tests.fakes.polling import wait_until
from tests.fakes.processes import freeze

ROOT = Path(__file__).parents[2]

Spawn = Callable[..., subprocess.Popen[bytes]]
ENGINE = """
import os, signal, subprocess, sys
server = "trap '' TERM; (trap '' TERM; while :; do sleep 600; done) & wait; while :; do sleep 600; done"
subprocess.Popen(["sh", "-c", server], process_group=0, env={"PATH": os.environ["PATH"], **eval(sys.argv[1])})
print('up', flush=True)
sys.stdin.read()
"""
"""A worker whose engine is a process group of its own, with a grandchild; both are deaf to SIGTERM."""
PARENT = "import subprocess,sys; subprocess.Popen(['sleep','600']); print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a leader of its own group; whatever of these groups is left at the end is killed."""
    children: list[subprocess.Popen[bytes]] = []

    def start(*command: str, marked: bool = True, **options: object) -> subprocess.Popen[bytes]:
        env = {"PATH": os.environ["PATH"], **({"DYNAPLAN_WORKER_NAME": "dynamo_W"} if marked else {})}
        child = subprocess.Popen(command, env=env, start_new_session=True, **options)  # type: ignore[call-overload]
        children.append(child)
        return child  # type: ignore[no-any-return]

    yield start
    for child in children:
        for pid in session_members(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()


def family(spawn: Spawn, marked: bool = True) -> tuple[subprocess.Popen[bytes], int]:
    """A leader with a child in its group, and the leader's start time."""
    leader = spawn(sys.executable, "-c", PARENT, marked=marked, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert leader.stdout is not None
    assert leader.stdout.readline() == b"up\n"
    assert len(group_members(leader.pid)) == 2
    return leader, identity_of(leader.pid).started_at


def test_a_name_with_spaces_and_parentheses_does_not_mislead(spawn: Spawn, tmp_path: Path) -> None:
    odd = tmp_path / "a) R (b"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", odd)
    child = spawn(str(odd), "600")
    wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "a) R (b\n")
    assert group_members(child.pid) == (child.pid,)
    assert abs((identify(child.pid) or 0) - (identify(os.getpid()) or 0)) < 100_000_000


def test_a_zombie_counts_as_gone(spawn: Spawn) -> None:
    child = spawn("true")
    wait_until(lambda: identify(child.pid) is None)
    assert Path(f"/proc/{child.pid}").exists()
    assert group_members(child.pid) == ()


def test_the_whole_group_is_killed(spawn: Spawn) -> None:
    leader, started_at = family(spawn)
    assert len(kill_group(leader.pid, started_at)) == 2
    wait_until(lambda: group_members(leader.pid) == ())


def test_a_process_that_only_has_the_same_pid_is_left_alone(spawn: Spawn) -> None:
    leader, started_at = family(spawn)
    assert kill_group(leader.pid, started_at - 1) == ()
    assert len(group_members(leader.pid)) == 2


@pytest.mark.parametrize("is_reaped", [True, False])
def test_children_are_killed_when_their_leader_has_gone_before(spawn: Spawn, is_reaped: bool) -> None:
    leader, started_at = family(spawn)
    leader.kill()
    wait_until(lambda: identify(leader.pid) is None)
    if is_reaped:
        leader.wait()
    assert len(kill_group(leader.pid, started_at)) == 1
    wait_until(lambda: group_members(leader.pid) == ())


def test_strangers_in_a_group_without_its_leader_are_left_alone(spawn: Spawn) -> None:
    leader, started_at = family(spawn, marked=False)
    leader.kill()
    leader.wait()
    assert kill_group(leader.pid, started_at) == ()
    assert len(group_members(leader.pid)) == 1


def worker_with_engine(spawn: Spawn, marks: str) -> tuple[subprocess.Popen[bytes], int]:
    """A worker whose engine has a group of its own, and its start time."""
    worker = spawn(sys.executable, "-c", ENGINE, marks, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"up\n"
    # The worker; the engine and its child, each with a sleep.
    wait_until(lambda: len(session_members(worker.pid)) == 4)
    assert group_members(worker.pid) == (worker.pid,)
    return worker, identity_of(worker.pid).started_at


@pytest.mark.parametrize("is_leader_killed", [False, True])
def test_an_engine_with_a_group_of_its_own_is_killed_at_once_with_its_children(
    spawn: Spawn, is_leader_killed: bool
) -> None:
    worker, started_at = worker_with_engine(spawn, "{'DYNAPLAN_WORKER_NAME': 'dynamo_W'}")
    if is_leader_killed:
        worker.kill()
        worker.wait()
    assert len(kill_group(worker.pid, started_at)) == 4 - is_leader_killed
    wait_until(lambda: session_members(worker.pid) == ())
    assert kill_group(worker.pid, started_at) == ()


def test_strangers_in_a_session_without_its_leader_are_left_alone(spawn: Spawn) -> None:
    worker, started_at = worker_with_engine(spawn, "{}")
    worker.kill()
    worker.wait()
    assert kill_group(worker.pid, started_at) == ()
    assert len(session_members(worker.pid)) == 3


SHIMMED = """
import os, subprocess, sys
from dynaplan.process.shim import shim_command
server = "setsid sleep 600 & exec sleep 600"
subprocess.Popen(shim_command(["sh", "-c", server], os.getpid()), process_group=0)
print('up', flush=True)
sys.stdin.read()
"""
"""A worker whose engine has a child in a session of its own."""


def shimmed_worker(spawn: Spawn) -> tuple[subprocess.Popen[bytes], int, list[int]]:
    """A worker with a shim, its start time, and what is below the shim: the engine, and its child apart."""
    worker = spawn(
        sys.executable, "-c", SHIMMED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=str(ROOT)
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"up\n"
    below = wait_until(lambda: (found := descendants_of(worker.pid))[2:] and found)
    wait_until(lambda: len({os.getsid(pid) for pid in below}) == 2)
    return worker, identity_of(worker.pid).started_at, below


@pytest.mark.parametrize("waits_s", [0.0, TRACKERS_TIMEOUT_S])
def test_what_an_engine_has_in_other_sessions_ends_with_its_worker(spawn: Spawn, waits_s: float) -> None:
    worker, started_at, below = shimmed_worker(spawn)

    kill_group(worker.pid, started_at, waits_s)

    wait_until(lambda: not any(identify(pid) for pid in (worker.pid, *below)))
    worker.wait()
    assert kill_group(worker.pid, started_at) == ()


def test_a_worker_that_was_stopped_with_all_its_processes_is_ended_with_them(spawn: Spawn) -> None:
    worker, started_at, below = shimmed_worker(spawn)
    for pid in (worker.pid, *below):
        freeze(pid)

    kill_group(worker.pid, started_at)

    wait_until(lambda: not any(identify(pid) for pid in (worker.pid, *below)))


DEAF = """
import subprocess, time
def main(arguments):
    subprocess.Popen(["setsid", "sleep", "600"])
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_shim_that_does_not_end_is_killed_in_a_later_look_with_all_below_it(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shim is one by its command line only."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: pytest.fail("it blocks"))
    monkeypatch.setattr("dynaplan.process.process_table.time", clock)
    (tmp_path / "dynaplan" / "process").mkdir(parents=True)
    (tmp_path / "dynaplan" / "process" / "shim.py").write_text(DEAF)
    command = isolated_command("shim", "--child", "1")
    command[5] = str(tmp_path)  # the place of the package
    shim = spawn(*command, stdout=subprocess.PIPE)
    assert shim.stdout is not None and shim.stdout.readline() == b"up\n"
    started_at = identity_of(shim.pid).started_at
    [apart] = wait_until(lambda: [each for each in descendants_of(shim.pid) if os.getsid(each) == each])

    for now[0] in (200.0, 200.0 + TRACKERS_TIMEOUT_S - 0.1):
        assert kill_group(shim.pid, started_at) == (shim.pid,)
    assert identify(apart)
    now[0] = 200.0 + TRACKERS_TIMEOUT_S
    kill_group(shim.pid, started_at)
    wait_until(lambda: not any(identify(pid) for pid in (shim.pid, apart)))


def test_our_own_group_is_never_killed() -> None:
    assert kill_group(os.getpgrp(), identify(os.getpgrp()) or 0) == ()
    assert kill_group(0, 0) == kill_group(1, identify(1) or 0) == ()


def document(arbiter: ProcessIdentity, pid: int, started_at: int) -> Document:
    entry = {"pid": pid, "started_at": started_at}
    return {
        "arbiter": {"pid": arbiter.pid, "started_at": arbiter.started_at, "boot_id": arbiter.boot_id},
        "components": {"dynamo_W": entry, "dynamo_Gone": {"pid": 0, "started_at": 0}, "dynamo_Original": {}},
    }


def ended(document: Document) -> list[str]:
    return end_leftovers(document, processes)


def test_what_a_dead_arbiter_left_is_ended_and_told(spawn: Spawn) -> None:
    leader, started_at = family(spawn)
    dead = ProcessIdentity(os.getpid(), 1, boot_id())
    assert ended(document(dead, leader.pid, started_at)) == [
        f"killed dynamo_W (session {leader.pid}, 2 processes), left by arbiter {os.getpid()}"
    ]
    wait_until(lambda: group_members(leader.pid) == ())
    assert ended(document(dead, leader.pid, started_at)) == []


def test_nothing_is_ended_while_the_arbiter_lives_or_after_a_reboot(spawn: Spawn) -> None:
    leader, started_at = family(spawn)
    assert ended(document(identity_of(os.getpid()), leader.pid, started_at)) == []
    assert ended(document(ProcessIdentity(os.getpid(), 1, "another boot"), leader.pid, started_at)) == []
    assert ended({"components": {"dynamo_W": {"pid": leader.pid, "started_at": started_at}}}) == []
    assert len(group_members(leader.pid)) == 2


SHARER = """
import os
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
os.kill(os.getpid(), 19)
"""


HELD = """
import os, subprocess, sys, time
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True,
                 pass_fds=[resource_tracker._resource_tracker._fd])
print("up", flush=True)
time.sleep(600)
"""


def test_a_tracker_that_does_not_end_is_killed_in_a_later_look_and_holds_nobody_up(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: pytest.fail("it blocks"))
    monkeypatch.setattr("dynaplan.process.process_table.time", clock)
    leader = spawn(sys.executable, "-c", HELD, stdout=subprocess.PIPE)
    assert leader.stdout is not None and leader.stdout.readline() == b"up\n"
    started_at = identity_of(leader.pid).started_at
    holder = next(each for each in psutil.Process(leader.pid).children() if os.getsid(each.pid) == each.pid)
    try:
        assert len(kill_group(leader.pid, started_at)) == 2
        wait_until(lambda: len(session_members(leader.pid)) == 1)
        for now[0] in (200.0, 200.0 + TRACKERS_TIMEOUT_S - 0.1):
            assert len(kill_group(leader.pid, started_at)) == 1
        assert len(session_members(leader.pid)) == 1
        now[0] = 200.0 + TRACKERS_TIMEOUT_S
        assert len(kill_group(leader.pid, started_at)) == 1
        wait_until(lambda: not session_members(leader.pid))
        assert kill_group(leader.pid, started_at) == ()
    finally:
        holder.kill()


def test_a_tracker_is_known_though_it_was_looked_at_in_the_midst_of_its_exec(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has dropped the old command line then, and not set the new one yet."""
    process = spawn("sleep", "600")
    directory = tmp_path / str(process.pid)
    directory.mkdir()
    shutil.copyfile(f"/proc/{process.pid}/stat", directory / "stat")
    (directory / "cmdline").touch()
    written = (directory / "cmdline").write_bytes
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    monkeypatch.setattr(processes, "command_line", lambda pid: (directory / "cmdline").read_bytes())
    monkeypatch.setattr(
        processes.time, "sleep", lambda s: written(b"python\0-c\0from multiprocessing.resource_tracker")
    )
    assert processes.kill_but_self_ending([process.pid]) == {process.pid}
    assert process.poll() is None


@pytest.mark.parametrize("waits_s", [0.0, TRACKERS_TIMEOUT_S])
def test_shared_memory_of_a_killed_engine_is_removed(spawn: Spawn, waits_s: float) -> None:
    leader = spawn(sys.executable, "-c", SHARER, stdout=subprocess.PIPE)
    assert leader.stdout is not None
    shared = Path("/dev/shm") / leader.stdout.readline().decode().strip()
    wait_until(lambda: len(session_members(leader.pid)) == 2)
    assert shared.exists()

    kill_group(leader.pid, identify(leader.pid) or 0, waits_s)

    wait_until(lambda: not shared.exists() and not session_members(leader.pid))
