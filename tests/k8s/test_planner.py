"""``dynaplan planner --environment kubernetes`` as a user starts it, with traffic told by Prometheus."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynaplan.kubernetes.client import CONFIG_MAPS
from tests.fakes.polling import eventually
from tests.fakes.prometheus_server import PrometheusStandIn
from tests.k8s.conftest import Cluster

NAMESPACE = {"dynamo_namespace": "llm"}
ISL, OSL = 3000, 300


def traffic(requests: float) -> list[tuple[dict[str, str], str]]:
    """The series of an interval with that many requests."""
    parts: list[tuple[str, float, dict[str, str]]] = [("requests", requests, {}), ("samples", 3, {})]
    for name, tokens, bound in (
        ("input_sequence_tokens", ISL, "3700"),
        ("output_sequence_tokens", OSL, "440"),
    ):
        parts += [(f"{name}_sum", requests * tokens, {}), (f"{name}_count", requests, {})]
        parts += [(f"{name}_bucket", requests, {"le": le}) for le in (bound, "+Inf")]
    return [({"is": part, **NAMESPACE, **labels}, str(value)) for part, value, labels in parts]


@pytest.fixture
async def prometheus() -> AsyncIterator[PrometheusStandIn]:
    made = PrometheusStandIn()
    yield made
    await made.stop()


async def start(cluster: Cluster, directory: Path, url: str, *more: str) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
    environment["KUBECONFIG"] = str(cluster.server.kubeconfig("planner"))
    environment["HOME"] = environment["DYNAPLAN_NODE_DIR"] = str(directory)
    command = [
        *(sys.executable, "-m", "dynaplan", "planner", "--namespace", "llm"),
        *("--environment", "kubernetes", "--policy", "sla", "--prometheus-endpoint", url),
        *("--profile-results-dir", "mocker", "--adjustment-interval", "2", "--startup-time", "1"),
        *("--max-gpu-budget", "6", "--log-dir", str(directory / "log")),
        *("--slo-window", "20", *more),  # what a backtest looks back on, before which nothing is removed
    ]
    with (directory / "planner.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def decisions(directory: Path) -> list[dict[str, Any]]:
    path = directory / "log" / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_it_follows_the_traffic_through_an_outage_and_stays_within_its_budget(
    cluster, prometheus, tmp_path
):
    for role in ("prefill", "decode"):
        await cluster.add_deployment(role, 1)
    prometheus.series = traffic(1)
    planner = await start(cluster, tmp_path, await prometheus.start())
    try:
        await _followed(cluster, prometheus, tmp_path)
    finally:
        planner.send_signal(signal.SIGTERM)
        code = await planner.wait()
    assert code == 0
    assert "stopped" in (tmp_path / "planner.log").read_text()


async def _followed(cluster: Cluster, prometheus: PrometheusStandIn, directory: Path) -> None:
    async def gpus() -> int:
        return await cluster.replicas("prefill") + await cluster.replicas("decode")

    async def is_more() -> bool:
        return await gpus() > 2

    async def is_least() -> bool:
        return await gpus() == 2

    await eventually(lambda: decisions(directory), 90)
    prometheus.series = traffic(2000)
    await eventually(is_more, 90)
    assert await gpus() <= 6
    cluster.server.stop()
    seen = len(decisions(directory))
    await eventually(lambda: len(decisions(directory)) > seen + 2, 60)
    last = decisions(directory)[-1]["decision"]
    assert last["current"] == last["desired"]
    assert "API server does not answer" in last["steps"][-1]["why"]
    await asyncio.to_thread(cluster.server.start)
    prometheus.series = traffic(0)
    await eventually(is_least, 120)


async def test_bounds_that_a_person_writes_into_the_config_map_are_kept_until_they_are_gone(
    cluster, prometheus, tmp_path
):
    for role in ("prefill", "decode"):
        await cluster.add_deployment(role, 1)
    prometheus.series = traffic(1)
    held = {"holds": json.dumps({"decode": {"at_least": 3, "at_most": 3}})}
    await cluster.admin.create(
        CONFIG_MAPS,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "dynaplan-llm"}, "data": held},
    )
    planner = await start(cluster, tmp_path, await prometheus.start())

    async def has(replicas: int) -> bool:
        return await cluster.replicas("decode") == replicas

    try:
        await eventually(lambda: has(3), 120)
        seen = len(decisions(tmp_path))
        await eventually(lambda: len(decisions(tmp_path)) > seen + 2, 60)
        assert decisions(tmp_path)[-1]["decision"]["desired"]["decode"] == 3
        await cluster.admin.patch(CONFIG_MAPS, "dynaplan-llm", {"data": {"holds": "{}"}})
        await eventually(lambda: has(1), 120)
    finally:
        planner.send_signal(signal.SIGTERM)
        assert await planner.wait() == 0


async def test_it_says_what_is_wrong_with_the_cluster_and_exits_2(cluster, prometheus, tmp_path):
    await cluster.add_deployment("prefill", 1)
    planner = await start(cluster, tmp_path, await prometheus.start())
    assert await planner.wait() == 2
    text = (tmp_path / "planner.log").read_text()
    assert "no decode component" in text
    assert "dynaplan.io/role: decode" in text
    assert "Traceback" not in text
