"""One graph under the original, ``ai-dynamo`` 0.3.2, and under dynaplan: the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynaplan.process.guard import guard_command
from tests.e2e.deployment import Deployment
from tests.fakes.servers import Server

HERE = Path(__file__).with_name("dynamo")
ANSWERS = 8
PATIENCE_S = 180
"""The original takes half a minute to import on a busy machine."""

Answers = list[list[Any]]


@pytest.fixture
def original() -> Path:
    """The Python that has the original."""
    python = os.environ.get("DYNAPLAN_DYNAMO_PYTHON")
    if not python:
        pytest.skip("DYNAPLAN_DYNAMO_PYTHON names no Python with ai-dynamo 0.3.2 (tox -e interop makes one)")
    return Path(python)


ABORTED = -6
"""The exit code of the original's client when its interpreter ends while its own threads still run.

It has said everything by then. 0.3.2 does so now and then: ``PyGILState_Release: thread state must be
current when releasing``.
"""


def answers(command: list[str], environment: dict[str, str], ends: tuple[int, ...] = (0,)) -> Answers:
    asked = subprocess.run(
        command, env=environment, cwd=HERE, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )
    assert asked.returncode in ends
    return [json.loads(line) for line in asked.stdout.splitlines() if line.startswith("[")]


def answers_of_the_original(python: Path, environment: dict[str, str], log: Path) -> Answers:
    with log.open("wb") as output:
        serve = subprocess.Popen(
            guard_command([str(python.with_name("dynamo")), "serve", "chain:Front"], os.getpid()),
            cwd=HERE,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        return answers([str(python), "ask.py"], environment, ends=(0, ABORTED))
    finally:
        processes = psutil.Process(serve.pid).children(recursive=True)
        serve.terminate()
        psutil.wait_procs([psutil.Process(serve.pid), *processes], timeout=15)
        for process in processes:
            if process.is_running():
                process.kill()
        serve.wait(10)


@pytest.mark.timeout(400)
def test_a_graph_of_the_originals_api_has_the_same_answers_here(
    original: Path, tcp_etcd: str, nats: Server, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        **nats.environment,
        "ETCD_ENDPOINTS": tcp_etcd,
        "HOME": str(tmp_path),
        "PATH": f"{original.parent}:{os.environ['PATH']}",
    }
    expected = answers_of_the_original(original, environment, tmp_path / "original.log")
    assert len(expected) == ANSWERS, (tmp_path / "original.log").read_text()
    options = ("--compat", "dynamo", "--working-dir", str(HERE))
    with Deployment(tmp_path, "chain:Front", "", *options, namespace="interop") as deployment:
        deployment.start()
        asking = [sys.executable, str(Path(__file__).with_name("ask.py"))]
        ours = answers(asking, deployment.environment)
    assert ours == expected
