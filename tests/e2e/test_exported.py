"""What `dynaplan export kubernetes` writes runs: its containers as processes, asked by their own probes."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.e2e.traces import in_torture
from tests.fakes.load import stream_one
from tests.fakes.pods import BINARIES, Manifest, running
from tests.fakes.polling import eventually, wait_until

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def exported(directory: Path, *arguments: str) -> list[Manifest]:
    command = [
        str(BINARIES / "dynaplan"),
        "export",
        "kubernetes",
        *arguments,
        "--image",
        "example/dynaplan:1",
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def address_of_this_machine() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@in_torture
async def test_the_pods_of_an_exported_graph_find_each_other_answer_and_drain(tmp_path: Path) -> None:
    documents = exported(
        tmp_path,
        *("graphs.disagg:Frontend", "-f", "disagg.yaml", "--namespace", "box", "--Common.speedup-ratio=0"),
        *("--Planner.policy=both", "--Planner.profile-results-dir=h200_sxm-Llama-3.1-8B-Instruct-FP8"),
    )
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    arguments = by_name["Deployment", "box-planner"]["spec"]["template"]["spec"]["containers"][0]["args"]
    # No API server is there: the planner decides, and another one carries out.
    arguments[arguments.index("--environment=kubernetes")] = "--environment=virtual"
    with running(documents, tmp_path / "pods", address_of_this_machine()) as cluster:
        cluster.pod("box-nats").ready()
        frontend = cluster.pod("box-frontend")
        wait_until(lambda: frontend.is_well("startupProbe"))
        assert not frontend.is_well("readinessProbe")
        workers = [cluster.pod("box-decode"), cluster.pod("box-prefill")]
        planner = cluster.pod("box-planner")
        for pod in (*workers, frontend, planner):
            assert pod.ready().is_well("livenessProbe")
        url = f"http://{cluster.address}:{frontend.ports[8000]}"
        async with aiohttp.ClientSession() as client:
            outcome = await stream_one(client, url, MODEL, "Tell me about the lights.", 20)
        assert outcome.is_complete, outcome
        assert [pod.delete() for pod in workers] == [0, 0]
        await eventually(lambda: not frontend.is_well("readinessProbe"))
        assert frontend.is_well("livenessProbe")
        assert [pod.delete() for pod in (frontend, planner)] == [0, 0]
