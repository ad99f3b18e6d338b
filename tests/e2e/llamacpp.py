"""``dynaplan serve`` with llama.cpp, as a user starts it, and what the tests ask of it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from tests.e2e.deployment import Deployment

QUIET = ("--Planner.no-operation=true",)
MESSAGES = [{"role": "user", "content": "Tell me about the lights of the city. " * 12}]
WORKER = "dynamo_VllmWorker"
PREFILL_WORKER = "dynamo_PrefillWorker"


def aggregated(directory: Path, model: Path, *options: str) -> Deployment:
    """The aggregated graph with that GGUF model, not started."""
    model_option = f"--VllmWorker.model={model}"
    return Deployment(directory, "graphs.agg:Frontend", "llamacpp.yaml", model_option, *QUIET, *options)


def disaggregated(directory: Path, model: Path, *options: str) -> Deployment:
    """The disaggregated graph with that GGUF model, not started."""
    models = (f"--VllmWorker.model={model}", f"--PrefillWorker.model={model}")
    return Deployment(directory, "graphs.disagg:Frontend", "llamacpp_disagg.yaml", *models, *QUIET, *options)


def model_of(deployment: Deployment) -> str:
    """The name under which clients ask for its model."""
    return str(deployment.get_json("/v1/models")["data"][0]["id"])


def ask(deployment: Deployment, path: str, **fields: Any) -> tuple[int, Any]:
    """Status and document of the answer to a request with those fields."""
    body = json.dumps({"model": model_of(deployment), **fields}).encode()
    request = urllib.request.Request(deployment.url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chunks_of(deployment: Deployment, path: str, **fields: Any) -> list[Any]:
    """The events of a streamed answer; the closing one as its text, ``[DONE]``."""
    body = json.dumps({"model": model_of(deployment), "stream": True, **fields}).encode()
    request = urllib.request.Request(deployment.url + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [line[5:].strip() for line in response.read().decode().splitlines() if line[:5] == "data:"]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def prefills(deployment: Deployment) -> dict[str, float]:
    """How many prompts were computed where, as the frontend counts: remote, local, fallback."""
    text = urllib.request.urlopen(f"{deployment.url}/metrics", timeout=10).read().decode()
    return {
        sample.labels["place"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("prefills_total")
    }


def scratch_dir(deployment: Deployment) -> Path:
    """Where its workers keep KV entries on their way."""
    engines = psutil.Process(deployment.pid_of(WORKER)).children(recursive=True)  # a forked worker shows none
    environments = (engine.environ() for engine in engines)
    return Path(next(each["DYNAPLAN_SCRATCH_DIR"] for each in environments if "DYNAPLAN_SCRATCH_DIR" in each))


def scratch_files(deployment: Deployment) -> list[str]:
    return sorted(path.name for path in scratch_dir(deployment).iterdir())


def is_ready(deployment: Deployment, component: str, count: int) -> bool:
    workers = deployment.workers(component).values()
    return len(workers) == count and all(worker["state"] == "ready" for worker in workers)


async def started(deployment: Deployment) -> Deployment:
    """Start it without blocking the event loop."""
    return await asyncio.to_thread(deployment.start)


async def engine_of(deployment: Deployment, worker: str) -> tuple[str, str]:
    """The address of that worker's own engine, and the key it wants."""
    environment = deployment.clients_environment()
    store = EtcdStore.from_environment(environment)
    try:
        registrations = await store.list(SERVICES_PREFIX)
    finally:
        await store.close()
    instances = [Instance.from_json(each.value) for each in registrations]
    urls = {each.openai_url for each in instances if each.worker == worker and each.engine_url}
    assert len(urls) == 1, instances
    return urls.pop(), environment["DYNAPLAN_WORKER_TOKEN"]
