"""Dynamo 1.2.1's SLA planner drives our box, and reads our metrics through Prometheus."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from dynaplan.config.settings.worker import DEFAULT_PROFILE
from dynaplan.engines.sim.profiles import load_profile
from dynaplan.lab.profiling.results import write_points
from dynaplan.util.sockets import free_port
from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.polling import eventually
from tests.fakes.prometheus_server import find_prometheus
from tests.interop.conftest import Programs

VARIABLE = "DYNAPLAN_DYNAMO_PLANNER_PYTHON"
NAMESPACE = "my-box"
INTERVAL_S = 20
"""Seconds between two decisions of the planner."""

WITHIN_S = 240.0
GROWN = 3
"""Decode workers, of two at first, that six requests a second take."""

ITL_MS = 4.6
"""A target that one worker of the profile meets with a few requests at a time."""


@pytest.fixture
def planner_python() -> str:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no Python with ai-dynamo 1.2.1 (tox -e interop makes one)")
    return python


@pytest.fixture
def deployment(tmp_path: Path, tcp_etcd: str) -> Iterator[Deployment]:
    options = ("--gpus", "8", "--Planner.no-operation=true")
    with Deployment(
        tmp_path,
        "graphs.disagg:Frontend",
        "disagg.yaml",
        *options,
        namespace=NAMESPACE,
        environment={"ETCD_ENDPOINTS": tcp_etcd},
    ) as serve:
        yield serve.start()


def prometheus(directory: Path, target: str) -> tuple[list[str], str]:
    """The command of a Prometheus that reads this frontend every second, and its address."""
    program = find_prometheus()
    if not program:
        pytest.skip("there is no prometheus (Debian's package prometheus; tox -e interop fetches it)")
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


class Load:
    """Asks ``requests_per_s`` times a second, until cancelled; ``failed`` says what failed."""

    def __init__(self, url: str) -> None:
        self.requests_per_s = 6.0
        self.answered = 0
        self.failed: list[str] = []
        self._url = f"{url}/v1/completions"

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._ask(session))
                await asyncio.sleep(1 / self.requests_per_s)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        body = {"model": MODEL, "prompt": list(range(1000, 2000)), "max_tokens": 100, "stream": True}
        try:
            async with session.post(self._url, json=body) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            self.failed.append(repr(error))
            return
        if response.status != 200 or not text.rstrip().endswith("data: [DONE]"):
            self.failed.append(f"{response.status}: {text[-300:]}")
        self.answered += 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", ["frontend", "router"])
async def test_it_scales_our_decode_workers_up_and_down_with_the_traffic(
    source: str, deployment: Deployment, planner_python: str, programs: Programs, tmp_path: Path
) -> None:
    command, endpoint = prometheus(tmp_path, deployment.url)
    programs.start(command, deployment.environment)
    config = planner_config(tmp_path, endpoint, source)
    variables = {
        "DYN_NAMESPACE": NAMESPACE,
        "DYN_EVENT_PLANE": "zmq",
        "PROMETHEUS_ENDPOINT": endpoint,
        "SCALING_CHECK_INTERVAL": "1",
    }
    planner = programs.start(
        [planner_python, "-m", "dynamo.planner", "--config", config], {**deployment.environment, **variables}
    )

    def ready() -> int:
        assert planner.poll() is None, programs.text
        return sum(each["state"] == "ready" for each in deployment.workers("VllmWorker").values())

    async def has_grown() -> bool:
        return await asyncio.to_thread(ready) >= GROWN

    async def has_shrunk() -> bool:
        return await asyncio.to_thread(ready) == 1

    load = Load(deployment.url)
    asking = asyncio.create_task(load.run())
    try:
        await eventually(has_grown, WITHIN_S)
        # Its planner changes nothing in an interval without any request: it has to see a few.
        load.requests_per_s = 0.5
        await eventually(has_shrunk, WITHIN_S)
    except BaseException as error:
        raise AssertionError(f"{error}\n{programs.text}\n{deployment.text[-2000:]}") from error
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert load.answered
    assert load.failed == []
