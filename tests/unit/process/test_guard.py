"""Programs that do not outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dynaplan.graph import lifecycle
from dynaplan.process.guard import MAX_LOG_BYTES, guard_command
from dynaplan.process.kernel import EXIT_CANNOT_START
from tests.fakes.polling import wait_until


def test_a_server_dies_with_its_supervisor(tmp_path: Path) -> None:
    """The supervisor is killed with -9, as an arbiter may be."""
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log"), *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert supervisor.stdout is not None
    with supervisor.stdout:
        pid = int(supervisor.stdout.readline())
    wait_until(lambda: "up" in (tmp_path / "log").read_text())
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not _is_running(pid), timeout_s=2)


SUPERVISOR = """
import os, subprocess, sys, time
from dynaplan.process.guard import guard_command
child = subprocess.Popen(guard_command(sys.argv[2:], os.getpid(), log=sys.argv[1]), start_new_session=True)
open(sys.argv[1], "a").close()
print(child.pid, flush=True)
time.sleep(600)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_whose_supervisor_has_gone_already_does_not_start(tmp_path: Path) -> None:
    command = guard_command(["touch", str(tmp_path / "started")], 1, log=tmp_path / "log")
    assert subprocess.run(command, check=False).returncode == 1
    assert not (tmp_path / "started").exists()


def test_a_command_that_cannot_be_run_is_never_tried_again(tmp_path: Path) -> None:
    command = guard_command(["/nowhere/etcd"], os.getpid(), log=tmp_path / "log")
    assert subprocess.run(command, check=False).returncode == EXIT_CANNOT_START
    assert "/nowhere/etcd" in (tmp_path / "log").read_text()


def test_sigterm_ends_a_command_also_where_the_parent_ignores_it(tmp_path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    child = subprocess.Popen(guard_command(command, os.getpid(), log=tmp_path / "log"))
    wait_until(lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text())
    child.terminate()
    try:
        assert child.wait(10) == -signal.SIGTERM
    finally:
        child.kill()


def test_output_is_appended_and_a_log_that_has_grown_large_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("first", "second"):
        subprocess.run(
            guard_command(["sh", "-c", f"echo {word}; echo {word} >&2"], os.getpid(), log=log), check=True
        )
    assert log.read_text() == "first\nfirst\nsecond\nsecond\n"
    with log.open("ab") as file:
        file.truncate(MAX_LOG_BYTES + 1)
    subprocess.run(guard_command(["echo", "third"], os.getpid(), log=log), check=True)
    assert log.read_text() == "third\n"
    assert (tmp_path / "log.1").stat().st_size == MAX_LOG_BYTES + 1


def test_variables_are_dropped_by_prefix_and_others_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import os; print(sorted(key for key in os.environ if key in ('ETCD_A', 'NATS_B', 'C')))"
    command = guard_command([sys.executable, "-c", script], os.getpid(), log=log, without=("ETCD_", "NATS_"))
    subprocess.run(command, check=True, env={**os.environ, "ETCD_A": "1", "NATS_B": "2", "C": "3"})
    assert log.read_text() == "['C']\n"


def test_python_children_can_ask_to_die_with_their_parent() -> None:
    script = (
        "import sys; from dynaplan.process.kernel import die_with_parent; die_with_parent(int(sys.argv[1]))"
    )
    here = Path(__file__).parents[3]
    for parent_pid, expected in ((os.getpid(), 0), (1, 1)):
        tried = subprocess.run([sys.executable, "-c", script, str(parent_pid)], cwd=here, capture_output=True)
        assert tried.returncode == expected


def test_the_exit_code_for_never_is_the_one_that_the_supervisor_knows() -> None:
    assert EXIT_CANNOT_START == lifecycle.EXIT_CANNOT_START


def test_output_goes_where_ours_goes_without_a_log() -> None:
    printed = subprocess.run(
        guard_command(["echo", "here"], os.getpid()), check=True, capture_output=True, text=True
    )
    assert printed.stdout == "here\n"
