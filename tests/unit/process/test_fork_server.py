"""A forked process is what an executed one is, for itself and for the kernel, or it is executed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.polling import wait_until

REPOSITORY = Path(__file__).parents[3]

LOOKS = """
import atexit, ctypes, gc, json, logging, os, signal, sys, threading
what = sys.argv[1]
atexit.register(print, "at the end", flush=True)
if what == "exits":
    sys.exit(7)
if what == "fails":
    raise RuntimeError("on purpose")
if what == "ends":
    os.kill(os.getpid(), signal.SIGTERM)
if what == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
get = ctypes.CDLL(None).getenv
get.restype = ctypes.c_char_p
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file.read().splitlines())
def text(name):
    with open(f"/proc/self/{name}") as file:
        return file.read()
def is_open(name):
    return os.path.exists(f"/proc/self/fd/{name}")
module = sys.modules["__main__"]
print(json.dumps({
    "command line": text("cmdline"),
    "name": text("comm"),
    "environment": text("environ"),
    "own environment": dict(os.environ),
    "C's environment": [str(get(name)) for name in (b"GIVEN", b"ONLY_THE_SERVERS")],
    "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
    "descriptors": [name for name in os.listdir("/proc/self/fd") if is_open(name)],
    "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
    "parent": os.getppid(),
    "threads": threading.active_count(),
    "directory": os.getcwd(),
    "mask of files": os.umask(0),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "own module": [__name__, __spec__.name, __file__, vars(module) is globals(), sorted(globals())],
    "collects": gc.isenabled(),
    "streams": [sys.stdout.line_buffering, sys.stdout.encoding, sys.stdin.encoding],
    "reads": sys.stdin.read(),
    "logs to": str(logging.root.handlers),
    "handler": str(signal.getsignal(signal.SIGINT)),
}))
print(json.dumps([name in sys.modules for name in ("early", "late")]))
"""

DRIVER = """
import json, marshal, os, sys
from dynaplan.process import forking
from dynaplan.process.fork_server import FORK_SERVER
from dynaplan.process.parent_death import adopt_orphans
import dynaplan

own, spawner, found = sys.argv[1], forking.Spawner(), {}
adopt_orphans()
base = {**os.environ, "ONLY_THE_SERVERS": "1"}
base.pop("GIVEN", None)

def file_of(message):
    text = os.memfd_create("message", os.MFD_CLOEXEC)
    with open(text, "wb", closefd=False) as file:
        marshal.dump(message, file)
    return text

def prepare():
    command = [sys.executable, "-c", FORK_SERVER, os.path.dirname(dynaplan.__file__), "imported"]
    beginnings = [[sys.executable, "-m", "looks"], [sys.executable, "-P", "-m", "looks"]]
    spawner.prepare(file_of((command, base, beginnings, ["GIVEN", "ONLY_THE_SERVERS"])))

def spawn(name, *words, module="looks", cwd=own, **variables):
    environment = {key: text for key, text in base.items() if key != "ONLY_THE_SERVERS"}
    argv = [sys.executable, "-m", module, *words]
    read, write = os.pipe()
    given = os.memfd_create("given")
    os.write(given, b"what it reads")
    os.lseek(given, 0, 0)
    try:
        pid = spawner.spawn(file_of((argv, cwd, {**environment, **variables})), (given, write, write))
    except OSError as error:
        found[name] = error.errno
        return
    os.close(write)
    ended(name, pid, read)

def spawn_linked(name):
    argv = [sys.executable, "-P", "-m", "looks", "x"]
    read, write = os.pipe()
    link, own_output = os.memfd_create("link"), os.dup(1)
    os.dup2(write, 1)
    pid = spawner.spawn_linked(argv, base, link)
    os.dup2(own_output, 1)
    for each in (write, link, own_output):
        os.close(each)
    ended(name, pid, read)

def ended(name, pid, read):
    with open(read) as file:
        said = file.read()
    found[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said]

forking.ANSWER_S = 30.0
exec(sys.argv[2])
found["me"] = os.getpid()
print(json.dumps(found))
spawner.end_fork_server()
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""

HOLDER = """
import os, socket, subprocess, sys, time
import dynaplan
from dynaplan.process.fork_server import FORK_SERVER
from dynaplan.process.packets import PacketSocket
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
root, own = os.path.dirname(dynaplan.__file__), str(os.getpid())
subprocess.Popen([sys.executable, "-c", FORK_SERVER, root, "imported", own], stdin=theirs)
theirs.close()
link = PacketSocket(ours.detach())
link.ask(("left", [sys.argv[1]]))
link.close()
time.sleep(1)
"""

CLEARS_UP = """
from pathlib import Path
from dynaplan.process.process_table import identify
FIRST = THEN = ()
AFTERWARDS = "imported"
def clear_up(paths, holder_pid):
    Path(paths[0] + ".new").write_text(str(identify(holder_pid)))
    Path(paths[0] + ".new").rename(paths[0])
"""

Driven = Callable[..., dict[str, Any]]
FINE = 'FIRST = ("early", "nonexistent"); THEN = ("late",); AFTERWARDS = ""'
EARLY = "import logging; logging.basicConfig()"
LATE = "from pathlib import Path; Path(__file__).with_name('is late').touch()"


@pytest.fixture
def driven(tmp_path: Path) -> Driven:
    """Runs a process that starts others as a holder does; returns exit codes, and what they have printed."""

    def run(code: str, imported: str = FINE) -> dict[str, Any]:
        modules = {"looks": LOOKS, "imported": imported, "early": EARLY, "late": LATE}
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
        words = [sys.executable, "-c", DRIVER, str(tmp_path), code]
        ended = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    return run


def test_what_only_some_need_it_imports_when_nothing_is_asked_for(driven: Driven) -> None:
    found = driven(
        "import time\n"
        "prepare()\n"
        "while not os.path.exists(own + '/is late'):\n"
        "    time.sleep(0.005)\n"
        "spawn('forked', 'x')"
    )
    assert json.loads(found["forked"][1].splitlines()[1]) == [True, True]


def is_forked(result: list[Any]) -> bool:
    """Tell whether the process had the module that the fork server imports first."""
    code, said = result
    assert code == 0, said
    return bool(json.loads(said.splitlines()[1])[0])


def test_a_forked_process_is_as_an_executed_one(driven: Driven) -> None:
    spawn = "spawn('{}', 'x', '\u00fc', GIVEN='v' * 50_000);"
    found = driven(spawn.format("executed") + "prepare();" + spawn.format("forked"))
    assert (is_forked(found["executed"]), is_forked(found["forked"])) == (False, True)
    executed, forked = (json.loads(found[name][1].splitlines()[0]) for name in ("executed", "forked"))
    assert forked == executed
    assert forked["parent"] == found["me"]
    assert forked["leads its session"]
    assert forked["C's environment"] == [str(b"v" * 50_000), "None"]


def test_a_forked_program_has_its_link_and_with_p_no_directory_among_its_modules(driven: Driven) -> None:
    found = driven("spawn_linked('executed'); prepare(); spawn_linked('forked')")
    assert (is_forked(found["executed"]), is_forked(found["forked"])) == (False, True)
    executed, forked = (json.loads(found[name][1].splitlines()[0]) for name in ("executed", "forked"))
    assert "safe_path=True" in executed.pop("flags")
    assert "safe_path=False" in forked.pop("flags")
    assert forked == executed
    assert forked["descriptors"] == ["0", "1", "2", "3"]


def test_its_end_is_the_end_of_an_executed_one(driven: Driven) -> None:
    ways = ("exits", "fails", "ends", "interrupted")
    found = driven(
        f"for way in {ways}: spawn(way, way)\nprepare()\nfor way in {ways}: spawn('forked ' + way, way)"
    )
    assert [found[f"forked {way}"][0] for way in ways] == [found[way][0] for way in ways] == [7, 1, -15, -2]
    assert found["forked exits"] == found["exits"] == [7, "at the end\n"]
    assert found["fails"][1].splitlines()[-5:] == found["forked fails"][1].splitlines()[-5:]
    assert "RuntimeError: on purpose" in found["fails"][1]


def test_what_it_could_differ_in_is_executed(driven: Driven) -> None:
    found = driven(
        "prepare()\n"
        "spawn('before', 'x', GIVEN='1')\n"
        "spawn('another variable', 'x', LC_ALL='C')\n"
        "spawn('another module', 'x', module='another')\n"
        "spawn('nowhere', 'x', cwd='/nonexistent')\n"
        "spawn('after', 'x')\n"
    )
    assert is_forked(found["before"])
    assert not is_forked(found["another variable"])
    assert "No module named another" in found["another module"][1]
    assert found["nowhere"] == errno.ENOENT
    assert is_forked(found["after"])


@pytest.mark.parametrize(
    "imported",
    [
        "FIRST = ['threads']; import threading, time, sys; sys.modules['threads'] = None\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import os; os._exit(3)",
    ],
    ids=["has threads", "ends"],
)
def test_without_a_fork_server_that_answers_it_is_executed(driven: Driven, imported: str) -> None:
    found = driven("prepare(); spawn('first', 'x'); spawn('second', 'x')", imported)
    assert not is_forked(found["first"])
    assert not is_forked(found["second"])


def test_a_fork_server_that_was_killed_or_stands_still_holds_nothing_up(driven: Driven) -> None:
    found = driven(
        "def kill(number):\n"
        "    with open(f'/proc/self/task/{os.getpid()}/children') as file:\n"
        "        os.kill(int(file.read().split()[-1]), number)\n"
        "prepare(); spawn('forked', 'x')\n"
        "kill(9); spawn('killed', 'x')\n"
        "prepare(); spawn('again', 'x')\n"
        "forking.ANSWER_S = 0.3\n"
        "kill(19); spawn('still', 'x')\n"
        "spawn('gone', 'x')\n"
    )
    forked = [name for name in ("forked", "killed", "again", "still", "gone") if is_forked(found[name])]
    assert forked == ["forked", "again"]


def test_one_that_is_there_is_kept_and_another_takes_its_place(driven: Driven) -> None:
    found = driven(
        "prepare(); first = spawner._server; prepare(); found['is kept'] = spawner._server is first\n"
        "base['ANOTHER'] = '1'; prepare(); found['is another'] = spawner._server is not first\n"
        "spawn('forked', 'x')"
    )
    assert (found["is kept"], found["is another"]) == (True, True)
    assert is_forked(found["forked"])


def test_it_clears_up_when_the_holder_has_ended_and_not_when_its_socket_is_closed(tmp_path: Path) -> None:
    """The kernel closes the files of a killed process before that counts as gone."""
    (tmp_path / "imported.py").write_text(CLEARS_UP)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    seen = tmp_path / "seen"
    subprocess.run([sys.executable, "-c", HOLDER, str(seen)], env=environment, timeout=60, check=True)
    wait_until(seen.exists)
    assert seen.read_text() == "None"
