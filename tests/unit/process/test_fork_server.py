"""A forked process is what an executed one is, but for what the module names."""

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

from dynaplan.process.fork_server import ForkServer
from tests.fakes.polling import wait_until

REPOSITORY = Path(__file__).parents[3]

LOOKS = """
import atexit, ctypes, gc, json, os, signal, sys, threading

def main(arguments):
    what = arguments[0]
    atexit.register(print, "at the end", flush=True)
    if what == "exits":
        return 7
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
    print(json.dumps({
        "own environment": dict(os.environ),
        "C's environment": [str(get(name)) for name in (b"GIVEN", b"ONLY_THE_SERVERS")],
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "descriptors": [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")],
        "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "parent": os.getppid(),
        "threads": threading.active_count(),
        "directory": os.getcwd(),
        "mask of files": os.umask(0),
        "arguments": [arguments, sys.argv[1:]],
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "collects": gc.isenabled(),
        "streams": [sys.stdout.line_buffering, sys.stdout.encoding, sys.stdin.encoding],
        "reads": sys.stdin.read(),
        "handler": str(signal.getsignal(signal.SIGINT)),
    }))
    print(json.dumps([name in sys.modules for name in ("early", "late", "wanted")]))
    with open("/proc/self/comm") as file:
        print(file.read())
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""

DRIVER = """
import json, marshal, os, sys
from dynaplan.process import fork_server
from dynaplan.process.kernel import adopt_orphans, start_session
import dynaplan

own, server, found = sys.argv[1], None, {}
adopt_orphans()
base = {**os.environ, "ONLY_THE_SERVERS": "1"}
base.pop("GIVEN", None)

def prepare():
    global server
    command = [sys.executable, "-P", "-c", fork_server.RUN, os.path.dirname(dynaplan.__file__), "imported"]
    free = ["GIVEN", "ONLY_THE_SERVERS", "DYNAPLAN_WORKER_NAME"]
    server = fork_server.ForkServer((command, base, [sys.executable, "-m", "looks"], free))

def spawn(name, *words, cwd=own, **variables):
    environment = {key: text for key, text in base.items() if key != "ONLY_THE_SERVERS"} | variables
    argv = [sys.executable, "-m", "looks", *words]
    read, write = os.pipe()
    given, text = os.memfd_create("given"), os.memfd_create("command")
    os.write(given, b"what it reads")
    os.lseek(given, 0, 0)
    os.write(text, marshal.dumps((argv, cwd, environment)))
    streams = (given, write, write)
    try:
        pid = server.fork(text, streams) if server else 0
        pid = pid or start_session(argv, cwd, environment, streams)
    except OSError as error:
        found[name] = error.errno
        return
    os.close(write)
    with open(read) as file:
        printed = file.read()
    found[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed]

def kill(number):
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        os.kill(int(file.read().split()[-1]), number)

fork_server.FORK_TIMEOUT_S = 30.0
exec(sys.argv[2])
found["me"] = os.getpid()
print(json.dumps(found))
if server:
    server.end()
"""

HOLDER = """
import os, sys, time
import dynaplan
from dynaplan.process import fork_server
command = [sys.executable, "-P", "-c", fork_server.RUN, os.path.dirname(dynaplan.__file__), "imported"]
server = fork_server.ForkServer((command, dict(os.environ), [], []))
with open(f"/proc/self/task/{os.getpid()}/children") as file:
    print(file.read(), flush=True)
time.sleep(600)
"""

Driven = Callable[..., dict[str, Any]]
FINE = 'FIRST = ("early", "nonexistent"); WITH = {"GIVEN": ("wanted",)}; THEN = ("late",)'
LATE = "from pathlib import Path; Path(__file__).with_name('is late').touch()"


def environment_in(directory: Path, imported: str = FINE) -> dict[str, str]:
    modules = {"looks": LOOKS, "imported": imported, "early": "", "late": LATE, "wanted": ""}
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{directory}:{REPOSITORY}"}


@pytest.fixture
def driven(tmp_path: Path) -> Driven:
    """Runs a process that starts others as a supervisor does; returns exit codes, and what they have
    printed."""

    def run(code: str, imported: str = FINE) -> dict[str, Any]:
        words = [sys.executable, "-c", DRIVER, str(tmp_path), code]
        ended = subprocess.run(
            words,
            env=environment_in(tmp_path, imported),
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


def is_forked(result: list[Any]) -> bool:
    """Tell whether the process had the module that the fork server imports first."""
    code, printed = result
    assert code == 0, printed
    return bool(json.loads(printed.splitlines()[1])[0])


def test_what_only_some_need_it_imports_when_nothing_is_asked_for(driven: Driven) -> None:
    found = driven(
        "import time\n"
        "prepare()\n"
        "while not os.path.exists(own + '/is late'):\n"
        "    time.sleep(0.005)\n"
        "spawn('forked', 'x')"
    )
    assert json.loads(found["forked"][1].splitlines()[1]) == [True, True, False]


def test_after_one_quiet_second_it_imports_all_that_is_left_and_not_a_module_each_second(
    driven: Driven,
) -> None:
    many = 'FIRST = ("early",); WITH = {}; THEN = (*(f"absent{n}" for n in range(90)), "late")'
    wait = "\nwhile not os.path.exists(own + '/is late'):\n    time.sleep(0.005)\n"
    found = driven(f"import time\nprepare()\nspawn('first', 'x'){wait}spawn('second', 'x')", many)
    assert json.loads(found["second"][1].splitlines()[1])[1]


def test_what_only_processes_with_a_variable_need_it_imports_before_the_first_of_them(driven: Driven) -> None:
    given = {"without": "", "empty": ", GIVEN=''", "set": ", GIVEN='v'"}
    found = driven("prepare();" + ";".join(f"spawn('{name}', 'x'{each})" for name, each in given.items()))
    had = {name: json.loads(found[name][1].splitlines()[1])[2] for name in given}
    assert had == {"without": False, "empty": False, "set": True}


def test_a_forked_process_is_as_an_executed_one(driven: Driven) -> None:
    spawn = "spawn('{}', 'x', '\u00fc', GIVEN='v' * 50_000);"
    found = driven(spawn.format("executed") + "prepare();" + spawn.format("forked"))
    assert (is_forked(found["executed"]), is_forked(found["forked"])) == (False, True)
    executed, forked = (json.loads(found[name][1].splitlines()[0]) for name in ("executed", "forked"))
    assert forked == executed
    assert forked["parent"] == found["me"]
    assert forked["leads its session"]
    assert forked["C's environment"] == [str(b"v" * 50_000), "None"]


def test_the_kernel_names_it_by_the_end_of_the_workers_name(driven: Driven) -> None:
    found = driven("prepare(); spawn('forked', 'x', DYNAPLAN_WORKER_NAME='dynamo_PrefillWorker_12')")
    assert found["forked"][1].splitlines()[2] == "refillWorker_12"


def test_its_end_is_the_end_of_an_executed_one(driven: Driven) -> None:
    ways = ("exits", "fails", "ends", "interrupted")
    found = driven(
        f"for way in {ways}: spawn(way, way)\nprepare()\nfor way in {ways}: spawn('forked ' + way, way)"
    )
    assert [found[f"forked {way}"][0] for way in ways] == [found[way][0] for way in ways] == [7, 1, -15, -2]
    assert found["forked exits"] == found["exits"] == [7, "at the end\n"]
    assert "RuntimeError: on purpose" in found["forked fails"][1]


@pytest.mark.parametrize(
    ("argv", "environment", "is_forked"),
    [
        (["python", "-m", "worker", "--name", "a"], {"LANG": "C", "DYN_OLD": "1"}, True),
        (["python", "-m", "worker"], {"LANG": "C", "DYN_NEW": "2"}, True),
        (["python", "-m"], {"LANG": "C"}, False),
        (["python", "-m", "another"], {"LANG": "C"}, False),
        (["python3", "-m", "worker"], {"LANG": "C"}, False),
        (["python", "-X", "dev", "-m", "worker"], {"LANG": "C"}, False),
        (["python", "-m", "worker"], {"LANG": "de_DE"}, False),
        (["python", "-m", "worker"], {"DYN_OLD": "1"}, False),
        (["python", "-m", "worker"], {"LANG": "C", "LD_PRELOAD": ""}, False),
    ],
)
def test_what_it_could_differ_in_is_executed(
    argv: list[str], environment: dict[str, str], is_forked: bool
) -> None:
    server = ForkServer.__new__(ForkServer)
    server.description = [], {"LANG": "C", "DYN_OLD": "1"}, ["python", "-m", "worker"], ["DYN"]
    assert server.can_become(argv, environment) is is_forked


def test_a_directory_that_is_gone_is_an_error_and_the_next_one_is_forked(driven: Driven) -> None:
    found = driven("prepare(); spawn('nowhere', 'x', cwd='/nonexistent'); spawn('after', 'x')")
    assert found["nowhere"] == errno.ENOENT
    assert is_forked(found["after"])


@pytest.mark.parametrize(
    "imported",
    [
        "FIRST = ['threads']; THEN = (); import threading, time, sys; sys.modules['threads'] = None\n"
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
        "prepare(); spawn('forked', 'x')\n"
        "kill(9); spawn('killed', 'x')\n"
        "server.end(); prepare(); spawn('again', 'x')\n"
        "fork_server.FORK_TIMEOUT_S = 0.3\n"
        "kill(19); spawn('still', 'x')\n"
        "spawn('gone', 'x'); found['runs'] = server.runs\n"
    )
    assert found.pop("runs") is False
    forked = [name for name in ("forked", "killed", "again", "still", "gone") if is_forked(found[name])]
    assert forked == ["forked", "again"]


def test_it_dies_with_the_supervisor(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDER]
    supervisor = subprocess.Popen(words, env=environment_in(tmp_path), stdout=subprocess.PIPE)
    assert supervisor.stdout
    [pid] = supervisor.stdout.readline().split()
    supervisor.kill()
    supervisor.communicate()
    wait_until(lambda: not Path(f"/proc/{int(pid)}/cmdline").exists())
