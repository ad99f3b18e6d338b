"""Dynamo 1.2.1's SLA planner drives our box, and reads our metrics through Prometheus."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from dynaplan.adapters.engines.sim.profiles import DEFAULT_PROFILE, load_profile
from dynaplan.foundation.guard import guarded
from dynaplan.foundation.sockets import free_port
from dynaplan.profiler.results import write_points
from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.polling import eventually

VARIABLE = "DYNAPLAN_DYNAMO_PLANNER_PYTHON"
NAMESPACE = "my-box"
INTERVAL_S = 20
"""Seconds between two decisions of the planner."""

WITHIN_S = 240.0
ITL_MS = 4.6
"""A target that one worker of the profile meets with a few requests at a time."""


@pytest.fixture
def planner_python() -> str:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no Python with ai-dynamo 1.2.1 (tox -e interop makes one)")
    return python


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Programs to end after the test, the newest first."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for each in reversed(running):
        each.kill()
        each.wait(10)


@pytest.fixture
def deployment(tmp_path: Path, tcp_etcd: str) -> Iterator[Deployment]:
    options = ("--gpus", "8", "--Planner.no-operation=true")
    serve = Deployment(
        tmp_path,
        "graphs.disagg:Frontend",
        "disagg.yaml",
        *options,
        namespace=NAMESPACE,
        environment={"ETCD_ENDPOINTS": tcp_etcd},
    )
    try:
        yield serve.start()
    finally:
        serve.close()


def prometheus(directory: Path, target: str) -> tuple[list[str], str]:
    """The command of a Prometheus that reads this frontend every second, and its address."""
    program = os.environ.get("DYNAPLAN_PROMETHEUS") or shutil.which("prometheus")
    if not program:
        pytest.skip("there is no prometheus on PATH (Debian's package prometheus has one)")
    config = directory / "prometheus.yml"
    target = target.removeprefix("http://")
    job = {"job_name": "frontend", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    config.write_text(json.dumps({"scrape_configs": [job]}))
    address = f"127.0.0.1:{free_port()}"
    storage = f"--storage.tsdb.path={directory / 'prometheus'}"
    return [
        program,
        f"--config.file={config}",
        f"--web.listen-address={address}",
        storage,
    ], f"http://{address}"


def planner_config(directory: Path, endpoint: str, source: str) -> str:
    profile = directory / "profile"
    write_points(profile, load_profile(DEFAULT_PROFILE))
    return json.dumps(
        {
            "environment": "virtual",
            "namespace": NAMESPACE,
            "model_name": MODEL,
            "backend": "vllm",
            "mode": "disagg",
            "optimization_target": "sla",
            "pre_deployment_sweeping_mode": "thorough",
            "profile_results_dir": str(profile),
            "ttft": 500,
            "itl": ITL_MS,
            "throughput_adjustment_interval": INTERVAL_S,
            "enable_throughput_scaling": True,
            "enable_load_scaling": False,
            "load_adjustment_interval": 5,
            "load_predictor": "constant",
            "max_gpu_budget": 8,
            "prefill_engine_num_gpu": 1,
            "decode_engine_num_gpu": 1,
            "metric_pulling_prometheus_endpoint": endpoint,
            "throughput_metrics_source": source,
            "live_dashboard_port": 0,
            "report_interval_hours": None,
        }
    )


async def asking(url: str, requests_per_s: float) -> None:
    """Ask at that rate until cancelled."""
    body = {"model": MODEL, "prompt": list(range(1000, 2000)), "max_tokens": 100, "stream": True}

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.read()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(ask(session))
            await asyncio.sleep(1 / requests_per_s)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", ["frontend", "router"])
async def test_it_scales_our_decode_workers_with_the_traffic(
    source: str,
    deployment: Deployment,
    planner_python: str,
    programs: list[subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    log = tmp_path / "planner.log"

    def start(command: list[str], **environment: str) -> None:
        with log.open("ab") as output:
            programs.append(
                subprocess.Popen(
                    guarded(command, os.getpid()),
                    env={**deployment.environment, **environment},
                    cwd=tmp_path,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    command, endpoint = prometheus(tmp_path, deployment.url)
    start(command)
    config = planner_config(tmp_path, endpoint, source)
    variables = {
        "DYN_NAMESPACE": NAMESPACE,
        "DYN_EVENT_PLANE": "zmq",
        "PROMETHEUS_ENDPOINT": endpoint,
        "SCALING_CHECK_INTERVAL": "1",
    }
    start([planner_python, "-m", "dynamo.planner", "--config", config], **variables)

    def ready(at_least: int) -> bool:
        assert programs[-1].poll() is None, log.read_text()
        workers = deployment.workers("VllmWorker").values()
        return sum(each["state"] == "ready" for each in workers) >= at_least

    async def has_grown() -> bool:
        return await asyncio.to_thread(ready, 3)

    load = asyncio.create_task(asking(deployment.url, 6))
    try:
        await eventually(has_grown, WITHIN_S)
    except BaseException as error:
        raise AssertionError(f"{error}\n{log.read_text()[-8000:]}\n{deployment.text[-2000:]}") from error
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
