"""Every graph that is shipped, a user's own ones, and every way to start them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.deployment import MODEL, REPOSITORY, Deployment, dynaplan, refusal
from tests.fakes.load import Outcome, stream_one
from tests.fakes.polling import wait_until

QUIET = ("--Planner.no-operation=true",)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "original_configs"
HELLO = ("graphs.hello_world:Frontend", "hello_world.yaml")

Deploy = Callable[..., Deployment]


def answer(deployment: Deployment, prompt: str = "Hello", model: str = MODEL) -> Outcome:
    """One streamed chat completion on a connection of its own."""

    async def ask() -> Outcome:
        async with aiohttp.ClientSession() as session:
            return await stream_one(session, deployment.url, model, prompt, 8)

    return asyncio.run(ask())


def generate(deployment: Deployment, text: str = "test") -> str:
    """What ``curl URL/generate -d '{"text": ...}'`` prints."""
    body = json.dumps({"text": text}).encode()
    with urllib.request.urlopen(f"{deployment.url}/generate", body, timeout=10) as response:
        return str(response.read().decode())


def pids(deployment: Deployment, component: str) -> set[int]:
    """The processes of that service's workers that are ready."""
    workers = deployment.workers(component).values()
    return {worker["pid"] for worker in workers if worker["state"] == "ready"}


def started_services(deployment: Deployment) -> set[str]:
    return {str(worker["component"]) for worker in deployment.workers().values()}


def test_hello_world_answers_through_three_services_and_heals(deploy: Deploy) -> None:
    deployment = deploy(*HELLO, "--Backend.ServiceArgs.workers=2", namespace="inference")
    assert generate(deployment) == "Frontend: Middle: Backend: test-mid-back"
    backends = pids(deployment, "Backend")
    assert len(backends) == 2
    for pid in backends:
        os.kill(pid, signal.SIGKILL)
    assert generate(deployment) == "Frontend: Middle: Backend: test-mid-back"
    wait_until(lambda: len(pids(deployment, "Backend") - backends) == 2)


@pytest.mark.parametrize("graph", [pytest.param("agg_router", marks=pytest.mark.slow), "disagg_router"])
def test_a_graph_with_the_kv_router_answers(deploy: Deploy, graph: str) -> None:
    options = ("--Router.router=kv", "--VllmWorker.ServiceArgs.workers=2")
    deployment = deploy(f"graphs.{graph}:Frontend", f"{graph}.yaml", *options, *QUIET)
    outcomes = [answer(deployment, "one prefix for all of them " * 100) for _ in range(3)]
    assert all(outcome.is_complete for outcome in outcomes), outcomes


@pytest.mark.slow
def test_one_service_of_a_graph_alone(deploy: Deploy) -> None:
    deployment = deploy(*HELLO, "--service-name", "Backend", namespace="inference")
    assert started_services(deployment) == {"Backend"}


@pytest.mark.slow
def test_a_graph_given_as_a_file(deploy: Deploy) -> None:
    deployment = deploy("graphs/hello_world.py:Frontend", "", namespace="inference")
    assert generate(deployment, "two words").count("Frontend: Middle: Backend: ") == 2


def test_the_guides_own_graph_runs_as_it_says(deploy: Deploy, tmp_path: Path) -> None:
    guide = (REPOSITORY / "docs" / "guides" / "your-own-graph.md").read_text()
    (code,) = re.findall(r"```python\n(# my_graph.py\n.*?)```", guide, re.DOTALL)
    assert "dynaplan serve my_graph:Frontend" in guide
    (tmp_path / "my_graph.py").write_text(code)
    deployment = deploy("my_graph:Frontend", "", "--working-dir", str(tmp_path), namespace="hello")
    assert generate(deployment) == "Frontend: test-back"


AGG_YAML = str(REPOSITORY / "graphs" / "agg.yaml")
MINE = """
import graphs.disagg
from dynaplan.services import Frontend, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker)
"""


@pytest.mark.slow
def test_graphs_that_link_the_same_services_differently_do_not_mix(deploy: Deploy, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    mine = deploy("mine:Frontend", AGG_YAML, "--working-dir", str(tmp_path), namespace="mine")
    assert started_services(mine) == {"Frontend", "VllmWorker"}
    assert answer(mine).is_complete


@pytest.mark.parametrize("config", ["disagg.yaml", pytest.param("agg_router.yaml", marks=pytest.mark.slow)])
def test_a_yaml_of_the_original_serves_unchanged(deploy: Deploy, config: str) -> None:
    deployment = deploy(f"graphs.{config.removesuffix('.yaml')}:Frontend", str(FIXTURES / config))
    (model,) = (each["id"] for each in deployment.get_json("/v1/models")["data"])
    assert model == "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    assert answer(deployment, "word " * 500, model).is_complete


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        ("ETCD_ENDPOINTS", "http://127.0.0.1:9"),
        ("NATS_SERVER", "nats://127.0.0.1:9"),
    ],
)
def test_a_server_that_does_not_answer_is_named(tmp_path: Path, variable: str, address: str) -> None:
    assert f"{variable}={address}" in refusal(tmp_path, environment={variable: address})


def test_a_planner_on_its_own_watches_a_running_deployment(deploy: Deploy, tmp_path: Path) -> None:
    deployment = deploy("graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    options = [
        "--namespace=dynamo",
        "--no-operation",
        "--adjustment-interval=1",
        f"--log-dir={tmp_path / 'own'}",
    ]
    planner = subprocess.Popen(
        [dynaplan(), "planner", *options],
        cwd=tmp_path,
        env=deployment.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        decisions = wait_until(lambda: read_lines(tmp_path / "own" / "decisions.jsonl"), 15)
    finally:
        planner.send_signal(signal.SIGINT)
        output, _ = planner.communicate(timeout=10)
    assert planner.returncode == 0, output
    assert "Traceback" not in output
    assert decisions[0]["decision"]["steps"]
    assert len(deployment.workers("VllmWorker")) == 1


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
