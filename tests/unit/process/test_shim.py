"""Programs that leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dynaplan.graph import lifecycle
from dynaplan.process.kernel import (
    EXIT_CANNOT_START,
    command_line,
    descendants,
    is_resource_tracker,
    isolated_command,
    parents,
)
from dynaplan.process.process_table import command_under, identify
from dynaplan.process.shim import END_SIGNAL, is_shim, shim_command
from tests.fakes.polling import wait_until

Shim = Callable[..., subprocess.Popen[bytes]]

FAMILY = """
import os, subprocess, sys, time
for is_apart in (False, True):
    subprocess.Popen([sys.executable, "-IS", __file__, "child"], start_new_session=is_apart)
orphan = "import os; os.fork() and os._exit(0); os.setsid(); os.execv('/bin/sleep', ['sleep', '600'])"
subprocess.run([sys.executable, "-ISc", orphan])
print("up", flush=True)
time.sleep(600)
"""
"""A server with children that outlive it: two as vLLM 0.32 starts its EngineCore, a Python process without a
parent-death signal, in its own group, and as it starts its snapshot helper, in a session of its own; and a
daemon, in a session of its own, whose parent has ended."""

CHILD = "import sys, time\nif sys.argv[1:] == ['child']: time.sleep(600)\n"


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    """Starts a command under a shim; nothing of it is left at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **options: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # type: ignore[call-overload]
            shim_command(command, os.getpid()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        started.append(process)
        return process  # type: ignore[no-any-return]

    yield start
    for process in started:
        for pid in (*descendants(process.pid, parents()), process.pid):
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate()


def says(process: subprocess.Popen[bytes], line: bytes = b"up\n") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line


def family_below(pid: int) -> list[tuple[int, int | None]]:
    """The pids and start times of the four: the server, its child, the one apart, the daemon.

    The daemon may still be about to begin its session.
    """
    wait_until(lambda: len({os.getsid(each) for each in descendants(pid, parents())}) == 3)
    found = [(each, identify(each)) for each in descendants(pid, parents())]
    assert len(found) == 4
    return found


def are_gone(processes: list[tuple[int, int | None]]) -> bool:
    return not any(identify(pid) == started_at for pid, started_at in processes)


@pytest.fixture
def family(tmp_path: Path) -> tuple[str, ...]:
    program = tmp_path / "family.py"
    program.write_text(CHILD + FAMILY)
    return sys.executable, "-IS", str(program)


def test_kill_9_of_the_parent_ends_all_that_the_command_has_started_in_other_sessions_too(
    family: tuple[str, ...],
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *family], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    says(parent)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    below = [(pid, identify(pid)), *family_below(pid)]
    parent.kill()
    parent.communicate()
    wait_until(lambda: are_gone(below))


PARENT = """
import os, subprocess, sys, time
from dynaplan.process.shim import shim_command
child = subprocess.Popen(shim_command(sys.argv[1:], os.getpid()), stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), end="")
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_command_ends_what_it_has_left_and_is_told_as_its_own(
    shim: Shim, family: tuple[str, ...], ends: signal.Signals
) -> None:
    process = shim(*family)
    says(process)
    below = family_below(process.pid)
    os.kill(command_under(process.pid), ends)
    assert process.wait(20) == -ends
    assert are_gone(below)


def test_the_parent_can_have_everything_killed(shim: Shim, family: tuple[str, ...]) -> None:
    process = shim(*family)
    says(process)
    below = family_below(process.pid)
    os.kill(process.pid, END_SIGNAL)
    assert process.wait(20) == -signal.SIGKILL
    assert are_gone(below)


def test_a_killed_shim_takes_its_command_along(shim: Shim) -> None:
    process = shim("sh", "-c", "echo up; exec sleep 600")
    says(process)
    below = [(pid, identify(pid)) for pid in descendants(process.pid, parents())]
    process.kill()
    wait_until(lambda: are_gone(below))
    assert below


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_are_passed_on_and_the_command_ends_in_its_own_way(
    shim: Shim, number: signal.Signals
) -> None:
    script = (
        f"import signal, sys, time; signal.signal({number}, lambda *_: sys.exit(5)); print('up', flush=True)"
    )
    process = shim(sys.executable, "-ISc", f"{script}\nwhile True: time.sleep(0.01)")
    says(process)
    process.send_signal(number)
    assert process.wait(20) == 5


def test_sigterm_reaches_a_command_whose_parent_ignores_it_and_the_ends_of_its_children(shim: Shim) -> None:
    ignored = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGCHLD)]
    try:
        process = shim("sh", "-c", "echo up; exec sleep 600")
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGCHLD), ignored, strict=True):
            signal.signal(number, handler)
    says(process)
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM


def test_children_that_end_before_the_command_are_reaped(shim: Shim) -> None:
    script = "(sleep 0.01 & exec sleep 0.02) & (sh -c 'sleep 0.01 &'); wait; echo up; read never"
    process = shim("sh", "-c", script, stdin=subprocess.PIPE)
    says(process)
    wait_until(lambda: len(_children_of(process.pid)) == 1)


def _children_of(pid: int) -> list[str]:
    """The children of a process, zombies included."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_the_shared_memory_of_a_killed_engine_is_removed(shim: Shim) -> None:
    script = (
        "import time; from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096); print(memory.name, flush=True); time.sleep(600)"
    )
    process = shim(sys.executable, "-c", script)
    assert process.stdout is not None
    shared = Path("/dev/shm") / process.stdout.readline().decode().strip()
    assert shared.exists()
    wait_until(lambda: any(map(_is_tracking, descendants(process.pid, parents()))))
    os.kill(process.pid, END_SIGNAL)
    assert process.wait(20) == -signal.SIGKILL
    assert not shared.exists()


def _is_tracking(pid: int) -> bool:
    """Tell whether a process is a resource tracker that has started: it ignores SIGTERM from then on.

    One that is still importing on a busy machine might be killed before it has read what to remove.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return is_resource_tracker(command_line(pid)) and bool(ignored >> (signal.SIGTERM - 1) & 1)


def test_without_the_parent_nothing_is_started(tmp_path: Path) -> None:
    command = shim_command(["touch", str(tmp_path / "started")], 1)
    tried = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (tried.returncode, tried.stderr) == (1, "the parent, process 1, is gone\n")
    assert not (tmp_path / "started").exists()


def test_an_engine_that_cannot_be_run_is_told_as_one_that_never_can(shim: Shim) -> None:
    process = shim("/nowhere/vllm")
    assert process.wait(20) == EXIT_CANNOT_START == lifecycle.EXIT_CANNOT_START
    assert process.stderr is not None
    assert process.stderr.read() == b"cannot run /nowhere/vllm: No such file or directory\n"


def test_it_shows_neither_the_words_nor_the_variables_of_its_command(shim: Shim) -> None:
    environment = {"PATH": os.environ["PATH"], "DYNAPLAN_WORKER_NAME": "dynamo_W", "VLLM_API_KEY": "hush"}
    process = shim("sh", "-c", "echo up; read never", stdin=subprocess.PIPE, env=environment)
    says(process)
    [command] = descendants(process.pid, parents())
    wait_until(lambda: is_shim(Path(f"/proc/{process.pid}/cmdline").read_bytes()))
    assert b"read never" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert Path(f"/proc/{process.pid}/environ").read_bytes() == b"DYNAPLAN_WORKER_NAME=dynamo_W\0"
    assert b"VLLM_API_KEY=hush" in Path(f"/proc/{command}/environ").read_bytes()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"vllm\0serve\0",
        "\0".join((*isolated_command("shim", "--parent", "7", "--", "sleep"), "")).encode(),
        "\0".join((*isolated_command("guard", "--child", "7"), "")).encode(),
        b"vllm\0serve\0--chat-template\0/x/process/shim.py\0--child\0--port\0",
    ],
)
def test_no_other_process_is_taken_for_a_shim(line: bytes) -> None:
    assert not is_shim(line)
