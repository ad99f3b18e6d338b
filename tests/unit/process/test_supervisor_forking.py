"""The fork server under a supervisor: it outlives the program, and ends with the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynaplan.process.kernel import parents
from dynaplan.process.process_table import identify
from tests.fakes.polling import wait_until

PROGRAM = """
import json, os, pathlib, sys, time
from dynaplan.process.supervisor import PROGRAM_STAGE
from dynaplan.process.supervisor_link import fork_under_supervisor, inherited_link
from dynaplan.process.guard import guard_command
own, version = sys.argv[1:]
link = inherited_link(os.environ)
command = [sys.executable, "-m", "program", own]
link = link or fork_under_supervisor([*command, "1"], 60.0, 5.0)
link.have_fork_server("imported", [sys.executable, "-m", "lives"], {}, ["OWN_VERSION", "DYNAPLAN_HOLDER"])
pids = {name: pid for name, pid in link.hello().pids.items() if name != "own"}
name = f"lives {version} {len(pids)}"
argv = [sys.executable, "-m", "lives", name, str(link.supervisor_pid)]
pids[name] = link.spawn(name, 0, argv, own, {**os.environ, "OWN_VERSION": version}, (0, 1, 2))
sleep = guard_command(["sleep", "600"], link.supervisor_pid)
own_pid = link.spawn("own", PROGRAM_STAGE, sleep, own, dict(os.environ), (0, 1, 2))
link.confirm_running(pathlib.Path(own, "successor"), pathlib.Path(own, "beat"), 60.0)
say = {"me": os.getpid(), "supervisor": link.supervisor_pid, "pids": pids, "own": own_pid}
print(json.dumps(say), flush=True)
if sys.stdin.readline() == "make way\\n":
    pathlib.Path(own, "successor").write_text("\\0".join([*command, "2"]))
    os.kill(os.getpid(), 9)
time.sleep(600)
"""

LIVES = """
import os, sys, time
from dynaplan.process.kernel import die_with_parent
def main(arguments):
    name, supervisor = arguments
    die_with_parent(int(supervisor))
    with open(f"{name}.new", "w") as file:
        file.write("forked" if "imported" in sys.modules else "executed")
    os.rename(f"{name}.new", name)
    time.sleep(600)
"""

IMPORTED = "FIRST = WITH = THEN = ()"


def fork_server_below(supervisor: int, forked: Iterable[int]) -> int:
    """The fork server that is a child of the supervisor; what it has forked has the same command line."""
    wait_until(lambda: len(set(forks_below(supervisor)) - set(forked)) == 1)
    [pid] = set(forks_below(supervisor)) - set(forked)
    return pid


def forks_below(supervisor: int) -> list[int]:
    """The children of the supervisor that are fork servers by their command line."""
    found = []
    for pid in [pid for pid, parent in parents().items() if parent == supervisor]:
        with suppress(OSError):  # one that has ended meanwhile
            if b"process.fork_server import" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_it_outlives_the_program_and_is_another_for_another_version_and_ends_with_the_supervisor(
    tmp_path: Path,
) -> None:
    files = {"program.py": PROGRAM, "lives.py": LIVES, "imported.py": IMPORTED}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = [sys.executable, "-m", "program", str(tmp_path), "1"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=tmp_path
    )
    try:
        first = said(process)
        server = fork_server_below(process.pid, first["pids"].values())
        os.kill(first["me"], signal.SIGKILL)
        second = said(process)
        assert fork_server_below(process.pid, second["pids"].values()) == server
        assert set(first["pids"]) < set(second["pids"])
        wait_until(lambda: identify(first["own"]) is None)
        assert process.stdin
        process.stdin.write(b"make way\n")
        process.stdin.flush()
        third = said(process)
        other = fork_server_below(process.pid, third["pids"].values())
        assert other != server
        wait_until(lambda: identify(second["own"]) is None)
        names = list(third["pids"])
        assert names == ["lives 1 0", "lives 1 1", "lives 2 2"]
        assert {parents()[pid] for pid in third["pids"].values()} == {process.pid}
        wait_until(lambda: all((tmp_path / name).exists() for name in names))
        assert {(tmp_path / name).read_text() for name in names} == {"forked"}
    finally:
        process.kill()
        process.communicate()
    everyone = [first["me"], second["me"], third["me"], server, other, third["own"], *third["pids"].values()]
    wait_until(lambda: not any(map(identify, everyone)))


def said(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The next thing that the program says; what the supervisor says is passed over."""
    assert process.stdout
    line = next(line for line in process.stdout if line.startswith(b"{"))
    found: dict[str, Any] = json.loads(line)
    return found
