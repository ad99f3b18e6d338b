"""``dynaplan.serve``: the words of the command, and what becomes of its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dynaplan
from dynaplan.cli import detach, python_api
from dynaplan.cli.detach import Detached
from dynaplan.cli.python_api import ServedDeployment, outside_loop
from dynaplan.fleet import deployments
from dynaplan.util.errors import ConfigError, DeploymentError, PermanentError, UserError


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A box on which serve starts, or ends with ``code``; ``words`` are its arguments."""
    here = SimpleNamespace(code=None, words=(), running=True, pid=0)
    monkeypatch.setenv("DYN_CIRCUS_LOG_DIR", str(tmp_path))

    def start(words: Any, directory: Path, log: Path, *, is_bound: bool) -> Detached:
        assert is_bound
        log.write_text("Error: wrong\n  Hint.\n")
        here.words = words
        here.thread = threading.current_thread()
        return Detached(1, here.code, log, 0)

    def find(namespace: str) -> Any:
        if not here.running:
            raise DeploymentError("no deployment")
        arbiter = SimpleNamespace(pid=here.pid)
        return SimpleNamespace(
            namespace=namespace, frontend_url="http://x:1", log_dir=tmp_path, arbiter=arbiter, began_s=0.0
        )

    monkeypatch.setattr(detach, "start_detached", start)
    monkeypatch.setattr(deployments, "find_deployment", find)
    return here


def test_a_model_alone_gets_the_file_of_its_engine(box: Any, tmp_path: Path) -> None:
    deployment = dynaplan.serve("graphs.agg:Frontend", model="x.gguf", gpus=2, options={"Planner.ttft": 300})
    assert box.words == [
        *("graphs.agg:Frontend", "--namespace", "dynamo", "--port", "0", "-f", "llamacpp.yaml"),
        *("--gpus", "2", '--Common.model="x.gguf"', "--Planner.ttft=300"),
    ]
    assert repr(deployment) == "<ServedDeployment dynamo at http://x:1>"


def test_a_thread_that_serves_may_end_before_its_deployment(box: Any) -> None:
    # The kernel ends the deployment with the thread that has started it.
    asking = threading.Thread(target=dynaplan.serve, args=("x.gguf",))
    asking.start()
    asking.join()
    assert box.thread.is_alive()


def test_a_model_in_the_place_of_the_graph_is_served_by_itself(box: Any) -> None:
    dynaplan.serve("x.gguf")
    assert box.words[0] == "graphs.agg:Frontend"
    assert '--Common.model="x.gguf"' in box.words


def test_a_file_of_models_and_several_models_are_served_as_they_are_named(box: Any) -> None:
    dynaplan.serve("models.yaml")
    assert box.words[:2] == ["models.yaml", "--namespace"]
    dynaplan.serve(["a.gguf", "b.gguf"])
    assert box.words[:3] == ["a.gguf", "b.gguf", "--namespace"]


def test_models_that_are_loaded_on_request_are_seen_and_moved(
    box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = dynaplan.serve("models.yaml")
    ran = commands(monkeypatch, out='{"models": {"ant": {"state": "ready"}}}')
    assert deployment.models() == {"ant": {"state": "ready"}}
    deployment.load("ant", keep="2h")
    deployment.unload("ant", wait=False)
    assert [each[:-2] for each in ran] == [
        ["models", "--json"],
        ["load", "ant", "--for", "2h", "--wait"],
        ["unload", "ant", "--no-wait"],
    ]


def test_wrong_input_is_the_users_error_and_another_end_has_the_log(box: Any) -> None:
    box.code = 2
    with pytest.raises(UserError, match="wrong"):
        dynaplan.serve("graphs.agg:Frontend")
    box.code = 78
    with pytest.raises(PermanentError, match="exit code 78") as raised:
        dynaplan.serve("graphs.agg:Frontend")
    assert "Hint." in raised.value.hint


def commands(monkeypatch: pytest.MonkeyPatch, code: int = 0, out: str = "", err: str = "") -> list[Any]:
    """Answer every command so; the words of each."""
    ran: list[Any] = []

    def run(words: Any, **options: Any) -> Any:
        ran.append(words[4:])
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(python_api.subprocess, "run", run)
    return ran


def test_it_is_watched_and_scaled_by_the_commands(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = dynaplan.serve("graphs.agg:Frontend")
    ran = commands(monkeypatch, out='{"namespace": "dynamo"}\n')
    assert deployment.status() == {"namespace": "dynamo"}
    deployment.scale(decode=2, hold=True)
    deployment.why(5)
    assert ran == [
        ["status", "--json", "--namespace", "dynamo"],
        ["scale", "decode=2", "--wait", "--hold", "--namespace", "dynamo"],
        ["why", "--last", "5", "--namespace", "dynamo"],
    ]
    assert deployment.decisions() == []


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (1, PermanentError)])
def test_a_command_that_is_refused_raises_what_it_says(
    box: Any, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    deployment = dynaplan.serve("graphs.agg:Frontend")
    commands(monkeypatch, code=code, err="Error: no GPUs\n  Lower it.\n")
    with pytest.raises(kind, match="no GPUs"):
        deployment.scale(decode=20)


def test_the_end_of_the_block_ends_it_and_reaps_it_and_an_error_ends_it_at_once(
    box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    box.pid = child.pid
    deployment = dynaplan.serve("graphs.agg:Frontend")
    ran = commands(monkeypatch)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ZeroDivisionError), deployment:
        raise ZeroDivisionError
    assert ran == [["stop", "--now", "--namespace", "dynamo"]]
    child.returncode = 0  # it has been waited for: its own object must not do that again
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    box.running = False
    deployment.stop()
    assert len(ran) == 1


def test_a_deployment_of_the_same_name_that_came_later_is_left_alone(
    box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = ServedDeployment(deployments.find_deployment("ns"))
    ran = commands(monkeypatch)
    box.pid = -1
    deployment.stop()
    assert ran == []


LOAD = "constant:rate=4,duration=30,isl=500,osl=20"


def test_rows_are_those_of_the_command() -> None:
    rows = dynaplan.simulate(
        LOAD, ["static:1", "static:2"], mode="agg", options={"VllmWorker.max-num-seqs": 8}
    )
    assert [row["policy"] for row in rows] == ["static:1", "static:2"]
    assert rows[0]["requests"] == rows[1]["requests"] > 100


async def test_it_works_where_an_event_loop_runs() -> None:
    assert dynaplan.simulate(LOAD, "static:1,1")[0]["policy"] == "static:1,1"
    assert outside_loop(threading.get_ident) != threading.get_ident()


def test_an_option_without_a_service_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Service\.key"):
        dynaplan.simulate(LOAD, options={"ttft": 3})


def test_importing_dynaplan_imports_nothing_of_it() -> None:
    script = "import sys, dynaplan; print([m for m in sys.modules if m.startswith('dynaplan.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dynaplan.nothing  # noqa: B018
