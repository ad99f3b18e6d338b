"""A program that is killed comes back under its supervisor, and finds what it had started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynaplan.process.kernel import descendants, parents
from dynaplan.process.process_table import identify
from dynaplan.process.supervisor import cleans_up, remove
from tests.fakes.polling import wait_until
from tests.fakes.processes import freeze

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from dynaplan.process.supervisor_link import fork_under_supervisor, inherited_link
from dynaplan.process.guard import guard_command
own, grace_s, what = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
link = inherited_link(os.environ)
if link and what == "never-back":
    sys.exit(3)
if link and what == "hangs":
    time.sleep(600)
is_first = link is None
link = link or fork_under_supervisor([sys.executable, "-c", SELF, *sys.argv[1:]], grace_s, 5.0)
ends = []
found = link.hello()
link.on_end = lambda *end: ends.append(end)
pids = dict(found.pids)
if not pids:
    link.keep_text("text", b"kept by the first")
    link.remove_at_the_end([own / "gone", own / "gone-too"], [own / "gone-if-empty", own], [
        (own / "marked", f"of {link.supervisor_pid}"), (own / "another's", f"of {link.supervisor_pid}")])
    for stage, name in enumerate(("one", "two")):
        trap = f"trap 'echo {name} >> {own}/drained; exit 7' TERM"
        quick = ["sh", "-c", trap + "; echo up; while :; do sleep 0.02; done"]
        streams = os.pipe()
        command = guard_command(quick, link.supervisor_pid)
        big = {**os.environ, "LARGE": "x" * 100_000, "LARGER": "y" * 100_000}
        pids[name] = link.spawn(name, stage, command, "/", big, (0, streams[1], 2))
        os.read(streams[0], 3)
    try:
        link.spawn("none", 0, ["/nonexistent/command"], "/", {}, (0, 1, 2))
    except FileNotFoundError:
        pids["none"] = 0
text = os.pread(found.kept["text"], 99, 0).decode() if found.kept else ""
if what in ("ignores", "is slow to start"):
    (own / "told").touch()
    signal.signal(signal.SIGTERM, lambda *_: open(own / "told", "a").write("x"))
while what == "is slow to start" and not (own / "told").read_text():
    time.sleep(0.01)
if what == "waits" and not is_first:
    (own / "starts").write_text(str(os.getpid()))
    while not (own / "go").exists():
        time.sleep(0.01)
    (own / "asks").touch()
if what != "starting":
    (own / "beat").write_text(str(os.getpid()))
    link.confirm_running(own / "successor", own / "beat", 0.6 if what == "stands still" else 60.0)
say = {"me": os.getpid(), "supervisor": link.supervisor_pid, "pids": pids, "text": text}
say["away_s"], say["ended"] = found.away_s, found.ended
say |= {"what": what, "is_trial": link.is_trial, "variable": os.environ.get("OF_THE_OTHER", "")}
print(json.dumps(say), flush=True)
if is_first and what.startswith("for "):
    other = ["env", "OF_THE_OTHER=1", sys.executable, "-c", SELF, *sys.argv[1:3], what.removeprefix("for ")]
    other = ["/nonexistent/python"] if what == "for nothing" else other
    (own / "successor").write_text("\\0".join(other))
    os.kill(os.getpid(), 9)
if what == "exit":
    sys.exit(5)
while not ends:
    time.sleep(0.01)
    (own / "beat").touch()
    link.poll()
print(json.dumps(ends), flush=True)
time.sleep(600)
"""

Program = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """Starts the program under a supervisor; nothing of either is left at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(what: str = "", grace_s: float = 60.0) -> subprocess.Popen[bytes]:
        code = f"SELF = open({str(tmp_path / 'program.py')!r}).read()\n{PROGRAM}"
        (tmp_path / "program.py").write_text(code)
        words = [sys.executable, "-c", code, str(tmp_path), str(grace_s), what]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in (*descendants(process.pid, parents()), process.pid):
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate()


def said(process: subprocess.Popen[bytes]) -> Any:
    """The next thing that a program says in JSON; what the supervisor says is passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line[:1] in b"[{":
            return json.loads(line)
    raise AssertionError("it says nothing more")


def are_gone(pids: dict[str, int]) -> bool:
    return all(identify(pid) is None for pid in pids.values() if pid)


def test_a_killed_program_comes_back_and_finds_its_processes_and_what_it_gave_to_keep(
    program: Program,
) -> None:
    process = program()
    first = said(process)
    assert first["supervisor"] == process.pid != first["me"]
    assert first["pids"]["none"] == 0
    os.kill(first["me"], signal.SIGKILL)
    second = said(process)
    assert second["me"] != first["me"]
    assert second["pids"] == {name: first["pids"][name] for name in ("one", "two")}
    assert second["text"] == "kept by the first"
    assert second["away_s"] > 0
    os.kill(second["pids"]["two"], signal.SIGTERM)
    assert [os.waitstatus_to_exitcode(status) for _, status in said(process)] == [7]


def test_a_program_that_comes_back_is_told_of_what_ended_meanwhile_with_the_wait_status(
    program: Program, tmp_path: Path
) -> None:
    process = program("waits")
    first = said(process)
    os.kill(first["me"], signal.SIGKILL)
    for name, number in (("one", signal.SIGTERM), ("two", signal.SIGKILL)):
        os.kill(first["pids"][name], number)
    wait_until(lambda: are_gone(first["pids"]))
    (tmp_path / "go").touch()
    second = said(process)
    assert second["ended"] == {str(first["pids"]["one"]): 7 << 8, str(first["pids"]["two"]): 9}
    assert second["pids"].keys().isdisjoint(first["ended"])


def test_the_exit_of_the_program_is_the_end_of_all_and_its_code_the_supervisors(program: Program) -> None:
    process = program("exit")
    pids = said(process)["pids"]
    assert process.wait(30) == 5
    assert are_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_end_is_passed_on_and_its_death_is_the_holders_own(
    program: Program, number: signal.Signals
) -> None:
    process = program()
    pids = said(process)["pids"]
    process.send_signal(number)
    # An interpreter that SIGINT interrupts dies of it, too.
    assert process.wait(30) == -number
    assert are_gone(pids)


def test_a_signal_to_end_that_comes_while_the_program_starts_is_passed_on_once(
    program: Program, tmp_path: Path
) -> None:
    process = program("is slow to start")
    wait_until((tmp_path / "told").exists)
    process.send_signal(signal.SIGTERM)
    said(process)  # the supervisor has answered that it is here
    assert (tmp_path / "told").read_text() == "x"


def test_a_signal_to_end_that_comes_together_with_the_programs_word_that_it_is_here_is_passed_on(
    program: Program, tmp_path: Path
) -> None:
    process = program("waits")
    os.kill(said(process)["me"], signal.SIGKILL)
    wait_until(lambda: (tmp_path / "starts").exists() and (tmp_path / "starts").read_text())
    again = psutil.Process(int((tmp_path / "starts").read_text()))
    freeze(process.pid)  # what comes meanwhile is handled in one turn
    (tmp_path / "go").touch()
    wait_until((tmp_path / "asks").exists)
    wait_until(lambda: again.status() == psutil.STATUS_SLEEPING)  # it waits for the answer
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == -signal.SIGTERM


def test_sighup_does_nothing(program: Program) -> None:
    process = program()
    pids = said(process)["pids"]
    process.send_signal(signal.SIGHUP)
    os.kill(pids["one"], signal.SIGTERM)
    assert said(process)
    assert process.poll() is None


def test_without_the_program_for_the_grace_everything_drains_in_order_and_files_go(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "file").touch()
    (tmp_path / "gone-too").touch()
    (tmp_path / "gone-if-empty").mkdir()
    process = program("never-back", grace_s=0.5)
    first = said(process)
    os.kill(first["me"], signal.SIGKILL)
    assert process.wait(30) != 0
    assert are_gone(first["pids"])
    assert (tmp_path / "drained").read_text().split() == ["one", "two"]
    assert not (tmp_path / "gone").exists()
    assert not (tmp_path / "gone-too").exists()
    assert not (tmp_path / "gone-if-empty").exists()


def test_a_program_killed_after_it_was_told_to_end_is_not_started_again_and_files_go(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    process = program("never-back", grace_s=60)
    first = said(process)
    freeze(first["me"])  # before it stands still, SIGTERM would end it
    process.terminate()
    # The supervisor kills a program that stands still and is to end: whoever comes first.
    with suppress(ProcessLookupError):
        os.kill(first["me"], signal.SIGKILL)
    assert process.wait(30) == 0
    assert are_gone(first["pids"])
    assert (tmp_path / "drained").read_text().split() == ["one", "two"]
    assert not (tmp_path / "gone").exists()


def test_another_program_takes_the_place_of_the_first_and_is_the_one_that_comes_back(
    program: Program,
) -> None:
    process = program("for the-other")
    first, second = said(process), said(process)
    assert (second["what"], second["is_trial"], second["variable"]) == ("the-other", True, "1")
    assert second["pids"] == {name: first["pids"][name] for name in ("one", "two")}
    assert second["text"] == "kept by the first"
    os.kill(second["me"], signal.SIGKILL)
    third = said(process)
    assert (third["what"], third["is_trial"], third["variable"]) == ("the-other", False, "1")
    assert third["pids"] == second["pids"]


@pytest.mark.parametrize("fault", ["never-back", "hangs", "nothing"])
def test_a_program_that_does_not_come_up_gives_its_place_back(program: Program, fault: str) -> None:
    process = program(f"for {fault}", grace_s=4.0)
    first, second = said(process), said(process)
    assert (second["what"], second["is_trial"], second["variable"]) == (f"for {fault}", False, "")
    assert second["pids"] == {name: first["pids"][name] for name in ("one", "two")}
    assert second["away_s"] < 4.0


def stopped(process: subprocess.Popen[bytes], own: Path) -> dict[str, Any]:
    """Stop the program under the supervisor, with two files of which one is the supervisor's; what it has
    said."""
    first: dict[str, Any] = said(process)
    (own / "marked").write_text(f"of {process.pid}, and more")
    (own / "another's").write_text("of 1")
    freeze(first["me"])
    return first


def test_a_stopped_program_cannot_keep_everything_from_ending_in_order(
    program: Program, tmp_path: Path
) -> None:
    process = program(grace_s=60)
    first = stopped(process, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert are_gone(first["pids"])
    assert (tmp_path / "drained").read_text().split() == ["one", "two"]
    assert not (tmp_path / "marked").exists()
    assert (tmp_path / "another's").exists()


def test_a_program_whose_heartbeat_stops_is_killed_and_comes_back_to_what_it_had_started(
    program: Program,
) -> None:
    process = program("stands still")
    first = said(process)
    freeze(first["me"])
    second = said(process)
    assert second["me"] != first["me"]
    assert second["pids"] == {name: first["pids"][name] for name in ("one", "two")}


def test_a_program_that_takes_its_time_is_killed_by_the_third_signal(
    program: Program, tmp_path: Path
) -> None:
    process = program("ignores", grace_s=60)
    first = said(process)
    for seen in range(2):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda seen=seen: (tmp_path / "told").read_text().count("x") > seen)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    assert are_gone(first["pids"])


def test_a_signal_to_end_counts_while_another_program_is_on_trial(program: Program) -> None:
    process = program("for hangs")
    pids = said(process)["pids"]
    process.terminate()
    assert process.wait(30) in (0, -signal.SIGTERM)  # of the first one, if that was still there
    assert are_gone(pids)


def test_kill_9_of_the_supervisor_leaves_nothing(program: Program) -> None:
    process = program()
    first = said(process)
    process.kill()
    process.wait()
    wait_until(lambda: are_gone({**first["pids"], "program": first["me"]}))


def test_the_supervisor_is_small(program: Program) -> None:
    process = program()
    said(process)
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    assert not [name for name in ("_ctypes", "_json", "_ssl", "_pickle") if f"/{name}." in loaded]


def test_files_links_and_directories_go_and_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    kept, inner = tmp_path / "kept", tmp_path / "run" / "deep"
    kept.mkdir()
    (kept / "file").touch()
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (inner / "link").symlink_to(kept)
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "alone").touch()
    remove([str(tmp_path / name) for name in ("run", "link", "alone", "nothing")])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept"]
    assert (kept / "file").exists()


def test_a_directory_with_a_slash_goes_only_if_it_is_empty(tmp_path: Path) -> None:
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    remove([f"{tmp_path}/empty/", f"{tmp_path}/full/"])
    assert [each.name for each in tmp_path.iterdir()] == ["full"]


def test_a_process_that_is_gone_or_another_program_does_not_clean_up() -> None:
    assert not cleans_up(os.getpid())
    assert not cleans_up(2**22 + 1)


def test_a_process_without_a_command_line_is_spared_as_it_may_become_one_that_cleans_up() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])  # like one in the midst of an exec it has none
    try:
        wait_until(lambda: cleans_up(ended.pid))
    finally:
        ended.wait()
