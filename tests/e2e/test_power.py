"""The power of GPUs: measured by model, capped by the hour, and what a cap has changed comes back."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.e2e.deployment import EXECUTED, Deployment
from tests.e2e.held import environment_of, kill_serve
from tests.e2e.test_ill_gpus import say
from tests.fakes.polling import eventually, wait_until

CAPPED = ("graphs.agg:Frontend", "agg.yaml", "--gpus", "1", "--power-cap", "250W")


def limit_watts(deployment: Deployment) -> float | None:
    """What the simulated driver was told last; None for nothing yet."""
    file = deployment.directory / "node" / "gpu-0.limit.json"
    return float(json.loads(file.read_text())["watts"]) if file.exists() else None


def metrics(deployment: Deployment) -> str:
    with urllib.request.urlopen(f"{deployment.url}/metrics/all", timeout=30) as answer:
        return str(answer.read().decode())


async def test_a_cap_is_kept_by_the_next_serve_and_ends_with_the_deployment(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy(*CAPPED, environment=EXECUTED)
    await eventually(lambda: limit_watts(deployment) == 250.0)
    say(deployment, 0, watts=231, utilisation=0.9)
    assert "231 of 250" in deployment.run("gpus").stdout
    assert (
        'dynaplan_gpu_power_limit_watts{dynamo_namespace="dynamo",gpu="0",name="simulated"} 250'
        in metrics(deployment)
    )
    assert 'dynaplan_model_watts{dynamo_namespace="dynamo",model="meta-llama/Llama-3.1-8B-Instruct"} 231' in (
        metrics(deployment)
    )
    worker = environment_of(deployment.pid_of("dynamo_VllmWorker"))
    assert worker["CUDA_DISABLE_PERF_BOOST"] == "1"

    await kill_serve(deployment)
    await eventually(
        lambda: deployment.text.count("Ready") > 1
    )  # before that the supervisor ends it, and no cap
    assert limit_watts(deployment) == 250.0
    assert (deployment.directory / "node" / "power-limit.GPU-SIM-0.json").exists()
    deployment.stop()
    assert limit_watts(deployment) == 700.0


def test_the_next_serve_gives_back_what_one_that_was_killed_with_its_supervisor_had_capped(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy(*CAPPED)
    wait_until(lambda: limit_watts(deployment) == 250.0, 30)
    assert deployment.process
    children = deployment.children()
    deployment.process.kill()
    for process in children:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deployment.process.wait()
    assert limit_watts(deployment) == 250.0

    deployment.command.remove("--power-cap")
    deployment.command.remove("250W")
    deployment.start()
    assert limit_watts(deployment) == 700.0
