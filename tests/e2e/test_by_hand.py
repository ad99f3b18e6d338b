"""What a person does by hand: it is told as a decision, and what would end the deployment is refused."""

from __future__ import annotations

import getpass
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

from circus.client import CircusClient

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.held import serve_of
from tests.fakes.polling import wait_until

OBSERVED = ("--Planner.no-operation=true",)


def status(deployment: Deployment) -> dict[str, Any]:
    answer = deployment.run("status", "--json")
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


def test_what_was_changed_by_hand_is_told_with_who_from_to_and_until_when(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *OBSERVED)
    assert "policy load, which only observes" in deployment.run("status").stdout
    deployment.run("scale", "decode=2", "--hold")
    deployment.run("release", "decode")
    deployment.run("restart", "dynamo_VllmWorker_1", timeout_s=120)
    deployment.run("reserve", "gpu=7", "--no-wait")
    for command in (("why",), ("why", "--changes", "-n", "9")):
        told = deployment.run(*command).stdout
        last = told.find(f"by hand ({getpass.getuser()}): GPU 7 reserved by ")
        assert last > 0, told
        assert command == ("why",) or (
            0
            < told.index(f"by hand ({getpass.getuser()}): decode 1 -> 2, held at 2 until ")
            < told.index("decode released, it was held at 2 by ")
            < told.index("restart of dynamo_VllmWorker_1")
            < told.index("dynamo_VllmWorker_1 was removed: ")
            < last
        ), told


def test_circusctl_ends_no_process_that_nothing_would_start_again(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *OBSERVED)
    client = CircusClient(endpoint=deployment.statefile()["circus_endpoint"], timeout=10)
    try:
        for name in ("dynamo_etcd", "dynamo_fleet"):
            for command in ("stop", "rm", "incr", "decr"):
                answer = client.send_message(command, name=name)
                assert answer["status"] == "error", (command, name, answer)
                assert f"circusctl restart {name}" in answer["reason"]
            assert client.send_message("restart", name=name, waiting=True)["status"] == "ok"
    finally:
        client.stop()
    scaled = deployment.run("scale", "decode=2", timeout_s=120)
    assert "carried out" in scaled.stdout, scaled.stdout + scaled.stderr


def test_a_worker_that_somebody_told_to_leave_is_shown_draining_and_serve_and_supervisor_by_their_pids(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *OBSERVED)
    found = status(deployment)
    serve = wait_until(lambda: serve_of(deployment))
    assert deployment.process
    assert (found["serve_pid"], found["supervisor_pid"]) == (serve.pid, deployment.process.pid)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 15_000, "stream": True, "ignore_eos": True}
    asked = urllib.request.Request(
        f"{deployment.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        assert answer.readline().startswith(b"data: ")
        os.kill(deployment.pid_of("dynamo_VllmWorker"), signal.SIGTERM)
        wait_until(lambda: worker_of(deployment)["state"] == "draining")
        assert "leaves: somebody revoked its lease or sent it a signal" in deployment.run("status").stdout
    wait_until(lambda: worker_of(deployment)["state"] == "ready", 60)  # the client has left


def worker_of(deployment: Deployment) -> dict[str, Any]:
    """The decode worker's row of ``status``."""
    return next(row for row in status(deployment)["workers"] if row["role"] == "decode")
