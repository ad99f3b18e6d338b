"""A GPU that falls ill is set apart: its worker moves, everything says why, and a person takes it back."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import serve_of
from tests.fakes.polling import wait_until

THREE_GPUS = ("graphs.agg:Frontend", "agg.yaml", "--gpus", "3", "--Planner.no-operation=true")


def say(deployment: Deployment, gpu: int, **health: Any) -> None:
    """Have the simulated driver say this of a GPU."""
    file = deployment.directory / "node" / f"gpu-{gpu}.json"
    file.write_text(json.dumps(health))


def on_gpus(deployment: Deployment) -> list[int]:
    """The GPUs of the ready decode workers."""
    ready = [each for each in deployment.workers("VllmWorker").values() if each["state"] == "ready"]
    return sorted(int(index) for each in ready for index in each["resources"]["allocated_gpus"])


def test_a_worker_leaves_an_ill_gpu_and_everything_that_shows_gpus_says_why(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    told = tmp_path / "events"
    deployment = deploy(*THREE_GPUS, "--on-event", f"sh -c 'cat >> {told}; echo >> {told}'")
    assert on_gpus(deployment) == [0]

    say(deployment, 0, xids=[79])
    wait_until(lambda: on_gpus(deployment) == [1], 60)
    why = "GPU 0 is set apart: Xid 79, it has fallen off the bus"
    wait_until(lambda: why in deployment.text, 30)
    assert why in deployment.run("status").stdout
    assert "set apart: Xid 79" in deployment.run("gpus").stdout
    with urllib.request.urlopen(f"{deployment.url}/metrics/all", timeout=30) as answer:
        assert (
            b'dynaplan_gpu_set_apart{dynamo_namespace="dynamo",gpu="0",why="set apart: Xid 79'
            in answer.read()
        )
    wait_until(lambda: told.exists() and why in told.read_text(), 60)


@pytest.mark.slow
def test_what_is_set_apart_outlives_serve_comes_back_by_a_word_and_is_never_the_last_gpu(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy(*THREE_GPUS)
    say(deployment, 0, xids=[79])
    wait_until(lambda: on_gpus(deployment) == [1], 60)
    wait_until(lambda: serve_of(deployment)).kill()  # it is in the statefile
    wait_until(lambda: serve_of(deployment) and "Xid 79" in deployment.run("status").stdout, 60)
    assert on_gpus(deployment) == [1]

    say(deployment, 1, is_lost=True)
    wait_until(lambda: on_gpus(deployment) == [2], 60)
    say(deployment, 2, has_remap_failed=True)
    last = "GPU 2 is ill: a row of its memory could not be remapped. It stays in use"
    wait_until(lambda: last in deployment.run("status").stdout, 30)
    assert on_gpus(deployment) == [2]
    refused = deployment.run("gpus", "--retire", "2")
    assert refused.returncode == 2
    assert "a decode worker takes 1: no request would be answered" in refused.stderr

    assert deployment.run("gpus", "--readmit", "0").stdout == "GPU 0 readmitted\n"
    wait_until(lambda: on_gpus(deployment) == [0], 60)  # GPU 2 is not the last any more
    wait_until(lambda: deployment.run("gpus", "--readmit", "2").returncode == 0, 30)
    assert deployment.run("gpus", "--retire", "0").returncode == 0
    wait_until(lambda: on_gpus(deployment) == [2], 60)
    assert "retired by " in deployment.run("gpus").stdout
    assert "is not set apart" in deployment.run("gpus", "--readmit", "2").stderr
