"""A hold keeps its number against a planner that wants another, whatever is killed meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.deployment import Deployment
from tests.e2e.test_kills import process_of
from tests.e2e.traces import in_torture
from tests.fakes.polling import wait_until

EAGER = (
    "--Planner.adjustment-interval=2",
    "--Planner.metric-pulling-interval=0.5",
    "--Planner.max-gpu-budget=3",
)
"""Without load it removes a decode worker every two seconds."""


def status(deployment: Deployment) -> dict[str, Any]:
    answer = deployment.run("status", "--json")
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


def ready(deployment: Deployment) -> int:
    return sum(worker["state"] == "ready" for worker in deployment.workers("VllmWorker").values())


def decisions(deployment: Deployment) -> int:
    logs = Path(deployment.statefile()["addresses"]["log_dir"]) / "planner"
    return sum(len(path.read_text().splitlines()) for path in logs.glob("*/decisions.jsonl"))


def kept_for_some_decisions(deployment: Deployment) -> None:
    """The planner decides twice more; both workers are there all the time, and neither is told to go."""
    before = decisions(deployment)

    def decided_twice() -> bool:
        workers = deployment.workers("VllmWorker").values()
        assert [worker["state"] for worker in workers if worker["state"] == "draining"] == []
        assert len(workers) == 2
        return decisions(deployment) >= before + 2

    wait_until(decided_twice, 60)


@in_torture
def test_a_held_number_outlives_kills_of_planner_plugin_and_etcd_until_it_is_released(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *EAGER)
    asked = deployment.run("scale", "decode=2", "--hold")
    assert "decode is held at 2 by " in asked.stdout, asked.stdout + asked.stderr
    kept_for_some_decisions(deployment)
    why = deployment.run("why", "-n", "1").stdout
    assert "one decode worker fewer" in why
    assert "held: decode is held at 2 by " in why
    assert ", instead of 1" in why

    for victim in ("--service-name Planner", "FleetPlugin"):
        process_of(deployment, victim).kill()
        kept_for_some_decisions(deployment)

    etcd = process_of(deployment, "etcdbin/etcd")
    data = Path(deployment.statefile()["addresses"]["runtime_dir"]) / "etcd" / "data"
    etcd.kill()
    shutil.rmtree(data, ignore_errors=True)
    wait_until(lambda: not any("key-value store" in each for each in status(deployment)["troubles"]), 60)
    kept_for_some_decisions(deployment)
    held = status(deployment)["holds"]["decode"]
    assert (held["at_least"], held["at_most"]) == (2, 2)

    refused = deployment.run("scale", "decode=1")
    assert refused.returncode == 2
    assert "dynaplan release decode" in refused.stderr
    released = deployment.run("release", "decode")
    assert released.stdout.startswith("released decode: it was held at 2 by ")
    wait_until(lambda: ready(deployment) == 1, 60)
    assert status(deployment)["holds"] == {}


@in_torture
def test_a_hold_ends_at_its_time_and_serve_says_so(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *EAGER)
    deployment.run("scale", "decode", "--at-least", "2", "--for", "8s")
    assert ready(deployment) == 2
    wait_until(lambda: ready(deployment) == 1, 60)
    wait_until(lambda: "decode was held at 2 or more by " in deployment.text, 10)
    assert ": expired." in deployment.text
