"""Models with planners of their own: each by its own load or traffic, on GPUs that they share."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.deployment import Deployment, dynaplan
from tests.e2e.held import serve_of
from tests.e2e.mixed_load import ask
from tests.fakes.load import Load
from tests.fakes.polling import eventually

PROFILE = "a100-bf16"

BY_LOAD = """
Common: {engine: sim, memory: 50GB, startup-time: 0.3, max-swap-wait: 0.5, ttl: 0, kv-total-tokens: 4096}
Models:
  ant: {Planner: {adjustment-interval: 1, metric-pulling-interval: 0.1}}
  bee: {}
"""

BY_TARGETS = f"""
Common: {{engine: sim, profile: {PROFILE}, memory: 50GB, startup-time: 0.3, ttl: 0}}
Planner:
  policy: sla
  profile-results-dir: {PROFILE}
  adjustment-interval: 1
  metric-pulling-interval: 0.1
  slo-window: 10
Models:
  ant: {{Planner: {{ttft: 250, itl: 100}}}}
  bee: {{Planner: {{ttft: 5000, itl: 500}}}}
"""


PAIR = """
Common: {engine: sim, memory: 50GB, startup-time: 0.3, max-swap-wait: 0.5, ttl: 0}
Models:
  ant:
    max-prefill-queue-size: 100
    prefill: {memory: 30GB, max-concurrent-prefills: 1, speedup-ratio: 0.2}
    Planner: {adjustment-interval: 1, metric-pulling-interval: 0.1}
"""
"""A GPU has room for a decode and a prefill worker, or for two prefill workers."""


def serving(directory: Path, config: str, gpus: int = 2) -> Deployment:
    """Simulated GPUs, of which each has room for one worker of 50 GiB; not started."""
    file = directory / "models.yaml"
    file.write_text(config)
    return Deployment(directory, str(file), "", "--gpus", str(gpus))


def ready(deployment: Deployment, name: str) -> int:
    return sum(each.get("state") == "ready" for each in deployment.workers(name).values())


async def test_the_planner_of_a_model_adds_a_worker_that_leaves_for_another_model_and_no_request_is_lost(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, BY_LOAD) as made:
        deployment = await asyncio.to_thread(made.start)
        async with Load(deployment.url, "ant", clients=12, tokens=60, prompt="word " * 500) as load:
            await eventually(lambda: ready(deployment, "ant") == 2)
            async with aiohttp.ClientSession() as session:
                other = await ask(session, deployment.url, "bee", is_stream=True, tokens=4)
            assert other.fault == ""
            assert ready(deployment, "ant") == 1
            planned = await asyncio.to_thread(watched_planner, deployment, "ant")
            assert "decode" in planned["last_decision"]
            assert planned["load"]["requests_per_s"] > 0
            await load.stop()
        assert load.incomplete == []
        why = (await asyncio.to_thread(deployment.run, "why", "--changes", "-n", "30")).stdout
        assert "one decode worker more" in why
        assert "model ant (worker 2): load: its planner wants 2 workers, and it has 1" in why
        assert "makes room for bee: other workers of ant go on" in why


@pytest.mark.slow
async def test_the_planner_of_a_disaggregated_model_adds_a_prefill_worker_by_its_own_queue(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, PAIR, gpus=3) as made:
        deployment = await asyncio.to_thread(made.start)
        async with Load(deployment.url, "ant", clients=12, tokens=8, prompt="word " * 2000) as load:
            await eventually(lambda: ready(deployment, "ant-prefill") == 2)
            await load.stop()
        assert load.incomplete == []
        assert '"ant (prefill)":2' in _wishes(deployment)
        why = (await asyncio.to_thread(deployment.run, "why", "--changes", "-n", "30")).stdout
        assert "model ant (prefill) (worker 2): load: its planner wants 2 prefill workers" in why
        assert "one prefill worker more" in why


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_models_are_planned_for_by_their_targets_and_who_kills_planner_and_serve_loses_nothing(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, BY_TARGETS) as made:
        deployment = await asyncio.to_thread(made.start)
        async with (
            Load(deployment.url, "ant", clients=8, tokens=20, prompt="word " * 1500) as load,
            Load(deployment.url, "bee", clients=1, tokens=20) as light,
        ):
            await eventually(lambda: _is_backtested(deployment, "ant") and _is_backtested(deployment, "bee"))
            await eventually(lambda: '"ant"' in _wishes(deployment))
            os.kill(deployment.pid_of("dynamo_Planner"), signal.SIGKILL)
            serve = await eventually(lambda: serve_of(deployment))
            adoptions = deployment.text.count("Adopted")
            serve.kill()
            await eventually(lambda: deployment.text.count("Adopted") > adoptions)
            assert '"ant"' in _wishes(deployment)
            await eventually(lambda: deployment.workers("Planner")["dynamo_Planner"]["state"] == "ready")
            await eventually(lambda: _is_backtested(deployment, "ant", starts=2))
            await load.stop()
            await light.stop()
        assert load.incomplete == []
        assert light.incomplete == []
        assert ready(deployment, "bee") == 1
        assert "-> prefill 0, decode 2" in decisions(deployment, "ant")
        assert "-> prefill 0, decode 2" not in decisions(deployment, "bee")
        runs = runs_in_tensorboard(deployment)
        assert runs.keys() == {"ant", "bee"}
        assert all("desired_decode_workers" in tags for tags in runs.values())


def watched_planner(deployment: Deployment, model: str) -> dict[str, Any]:
    """What `status --watch --json` has of the planned model, once its load was measured."""
    command = [dynaplan(), "status", "--watch", "--json"]
    with subprocess.Popen(command, env=deployment.environment, stdout=subprocess.PIPE) as watching:
        try:
            assert watching.stdout
            for line in watching.stdout:
                planned: dict[str, Any] = json.loads(line)["planned_models"][model]
                if planned["load"]:
                    return planned
        finally:
            watching.kill()
    raise AssertionError(f"`status --watch` ended before it had measured the load of {model}")


def runs_in_tensorboard(deployment: Deployment) -> dict[str, set[str]]:
    """The tags of the runs that TensorBoard finds in the planners' directory, by the model's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TensorBoard's own imports
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

        logs = Path(deployment.statefile()["addresses"]["log_dir"]) / "planner"
        found = EventMultiplexer().AddRunsFromDirectory(str(logs)).Reload()
        return {run.partition("/")[0]: set(tags["scalars"]) for run, tags in found.Runs().items()}


def decisions(deployment: Deployment, model: str) -> str:
    """What `why` says of the model's planner: its decisions stand among those of others, in order of time."""
    told = deployment.run("why", "-n", "200").stdout
    return "\n".join(re.findall(rf"(?ms)^model {model}\n(.*?)\n\n", f"{told}\n\n"))


def _wishes(deployment: Deployment) -> str:
    """What planners want, as the statefile keeps it."""
    return str(deployment.statefile()["planner_keys"].get("model_workers", ""))


def _is_backtested(deployment: Deployment, model: str, starts: int = 1) -> bool:
    """Tell whether a backtest of the model counts in the newest of so many logs of its planner."""
    logs = Path(deployment.statefile()["addresses"]["log_dir"]) / "planner" / model
    files = sorted(logs.glob("*/decisions.jsonl"))
    return len(files) >= starts and "would have kept" in files[-1].read_text()
