"""What the commands show on a terminal of 80 columns: nothing wider, in colours unless they are refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tests.e2e.deployment import Deployment, dynaplan
from tests.fakes.polling import wait_until
from tests.fakes.terminal import shown

COLUMNS = 80


def widest(text: str) -> str:
    return max(click.unstyle(text).splitlines(), key=len)


@pytest.mark.slow
def test_status_and_why_fit_the_screen_while_a_worker_loads(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy(
        "graphs.disagg:Frontend",
        "disagg.yaml",
        "--Planner.adjustment-interval=1",
        "--PrefillWorker.startup-time=600",
        namespace="a-long-namespace",
        wait=False,
    )

    def on_screen(*arguments: str) -> str:
        return shown([dynaplan(), *arguments], deployment.environment, deployment.directory)

    wait_until(lambda: "no change" in deployment.run("why").stdout, interval_s=0.5)
    for text in (on_screen("status"), on_screen("why")):
        assert len(widest(text)) <= COLUMNS, text
    text = on_screen("status")
    assert click.style("ready", fg="green") in text
    assert "a-long-namespace_PrefillWorker" in text
    assert "\x1b[33mloading" in text
    on_pipe = deployment.run("status").stdout
    assert len(widest(on_pipe)) > COLUMNS
    assert "\x1b" not in on_pipe


def test_simulate_fits_the_screen_and_is_whole_on_a_pipe(tmp_path: Path) -> None:
    command = [dynaplan(), "simulate", "--trace", "constant:rate=1,duration=20,isl=100,osl=10"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    policies = ["--policy", "static:1,1", "--policy", "best-static"]
    text = shown([*command, *policies], environment, tmp_path)
    assert "best-static:1,1" in text
    assert len(widest(text)) <= COLUMNS, text
    assert "QUEUED p95" not in text.splitlines()[0]
    on_pipe = subprocess.check_output([*command, *policies], env=environment, text=True)
    assert "QUEUED p95" in on_pipe.splitlines()[0]


@pytest.mark.parametrize(
    ("environment", "is_coloured"), [({}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)]
)
def test_an_error_is_coloured_unless_that_is_refused(
    tmp_path: Path, environment: dict[str, str], is_coloured: bool
) -> None:
    for arguments in (["replay", "nowhere"], ["pull", "smolm2"]):
        text = shown([dynaplan(), *arguments], {**os.environ, **environment}, tmp_path)
        assert "Error:" in text
        assert ("\x1b[" in text) is is_coloured, text
