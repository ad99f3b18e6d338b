"""What every test session needs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings
from xdist.workermanage import NodeManager

from tests.fakes import tiny_models
from tests.leftovers import end_leftovers, mark_session

pytest_plugins = [
    "tests.fakes.secured_etcd",
    "tests.fakes.servers",
    "tests.fakes.graph_files",
    "tests.fakes.hosts",
    "tests.e2e.deployment",
]
"""The modules whose fixtures every test may ask for by name."""

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

MARK = pytest.StashKey[str]()
LEFT = pytest.StashKey[dict[int, str]]()


# An example that takes long on a busy machine breaks no rule. The examples are the same in every run, so that
# a red one can be repeated; `tox -e torture` looks for new ones.
settings.register_profile("dynaplan", deadline=None, derandomize=not os.environ.get("DYNAPLAN_TORTURE"))
settings.load_profile("dynaplan")


def pytest_configure(config: pytest.Config) -> None:
    # pytest-asyncio asks for the current event loop, which makes one that nobody closes, unless it was set.
    asyncio.set_event_loop(None)
    # A shell has its background jobs ignore Ctrl-C, and so would all that is started here.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("COVERAGE_RUN"):
        # A worker writes what it has covered at its end, and is killed 10 s after the last test.
        NodeManager.EXIT_TIMEOUT = 120
    # A worker of pytest-xdist has the mark of its session already, and may be killed: the session looks.
    if not hasattr(config, "workerinput"):
        config.stash[MARK] = mark_session()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker of pytest-xdist imports its share of the test modules first.

    All workers collect the same modules at the same moment. Where none has been compiled yet, as in CI, each
    worker would rewrite the assertions of all modules. So it rewrites those of its share, and finds the
    others in the cache.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    root = session.config.rootpath
    folders = [root / argument.partition("::")[0] for argument in session.config.args]
    modules = sorted({path for folder in folders for path in folder.rglob("test_*.py")})
    for module in modules[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        # What cannot be imported is told when it is collected.
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(module.relative_to(root).with_suffix("").parts))


BOTH_LOOPS = {"test_connections.py", "test_malformed_requests.py"}
"""Modules whose tests run on both event loops: these differ in what they do at a connection's end."""

UVLOOP_FOLDERS = {"attack", "contract", "integration"}
"""Folders whose tests run on uvloop, as workers, frontends and planners do wherever it can be had."""

ASYNCIO_MODULES = {"test_orchestrate.py", "test_orchestrating.py", "test_virtual_connector.py"}
"""Modules of ``UVLOOP_FOLDERS`` that run on asyncio's own loop, as the commands do whose code they test."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    loops: Mapping[str, LoopFactory] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.path.name in BOTH_LOOPS:
        return loops
    is_on_uvloop = item.path.parent.name in UVLOOP_FOLDERS and item.path.name not in ASYNCIO_MODULES
    if item.get_closest_marker("looptime"):  # it makes the time of asyncio's loop virtual, of no other
        is_on_uvloop = False
    name = "uvloop" if is_on_uvloop else "asyncio"
    return {name: loops[name]}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """No process is left behind, not even by a worker that crashed."""
    mark = session.config.stash.get(MARK, "")
    if mark and (left := end_leftovers(mark)):
        session.config.stash[LEFT] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left = config.stash.get(LEFT, {})
    if left:
        terminalreporter.section("processes left behind, and killed", red=True)
        for pid, command in left.items():
            terminalreporter.line(f"{pid}: {command}")


@pytest.fixture(autouse=True)
def the_signals_of_before() -> Iterator[None]:
    """What the process does at signals is as it was: ``serve`` ignores them when it has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF model of 1.5 MB that llama.cpp loads in 20 ms."""
    pytest.importorskip("gguf")
    return tiny_models.tiny_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model directory without weights, for ``--load-format dummy``."""
    return tiny_models.tiny_hf(tmp_path_factory.mktemp("hf"))
