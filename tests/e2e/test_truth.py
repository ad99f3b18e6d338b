"""What ``status`` and ``scale`` say is so, also when the processes behind it do nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from circus.client import CircusClient

from dynaplan.store.etcd import EtcdStore
from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_kills import process_of
from tests.e2e.traces import in_torture
from tests.fakes.load import Load
from tests.fakes.polling import eventually, wait_until

QUIET = ("--Planner.no-operation=true",)


@in_torture
def test_a_stopped_fleet_plugin_is_named_and_replaced_and_scaling_goes_on(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    stopped = process_of(deployment, "FleetPlugin")
    stopped.suspend()
    silence = f"the fleet plugin (pid {stopped.pid}) has not answered for"
    wait_until(lambda: silence in deployment.run("status").stdout, 40)
    result = deployment.run("scale", "decode=2", timeout_s=120)
    assert (result.returncode, "carried out" in result.stdout) == (0, True), result.stderr
    assert "The fleet plugin stands still" in deployment.text
    assert json.loads(deployment.run("status", "--json").stdout)["troubles"] == []


NONSENSE = {
    "v1/dynamo/planner/num_decode_workers": "--5",
    "v1/dynamo/planner_extensions/holds": '{"decode": 7}',
    "/dynamo/disagg_router/max_prefill_queue_size": "²",
    "/services/dynamo/VllmWorker/generate/4d": '{"instance_id": Infinity, "component": ["x"], "card": []}',
    "/services/dynamo/VllmWorker/generate/4e": "[" * 200_000,
}


async def test_what_nobody_can_read_in_the_store_hinders_nothing_and_is_named(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET)
    store = EtcdStore.from_environment(deployment.clients_environment())
    # From then on a count that cannot be read is ignored; before, it would be written anew.
    await eventually(lambda: "num_decode_workers" in deployment.statefile().get("planner_keys", {}))
    await store.put("v1/dynamo/fleet", "[")
    for key, value in NONSENSE.items():
        await store.put(key, value)
    pid = deployment.pid_of("dynamo_VllmWorker")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: deployment.workers()["dynamo_VllmWorker"]["pid"] not in (0, pid))
    await eventually(lambda: deployment.workers()["dynamo_VllmWorker"]["state"] == "ready")
    async with Load(deployment.url, MODEL, clients=2, tokens=5) as load:
        await eventually(lambda: len(load.outcomes) > 2)
        await load.stop()
    assert load.incomplete == []
    shown = json.loads((await asyncio.to_thread(deployment.run, "status", "--json")).stdout)
    assert NONSENSE.keys() - shown["ignored_keys"].keys() == set()
    await asyncio.to_thread(deployment.scale, decode=2)
    await store.close()


def test_circusctl_replaces_a_worker_and_answers_in_words_what_it_cannot_do(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    client = CircusClient(endpoint=deployment.statefile()["circus_endpoint"], timeout=10)
    try:
        for command in ("incr", "stop"):
            answer = client.send_message(command, name="dynamo_VllmWorker")
            assert (answer["status"], "`dynaplan scale decode=N`" in answer["reason"]) == ("error", True)
        assert client.send_message("restart", name="dynamo_VllmWorker")["status"] == "ok"
    finally:
        client.stop()

    def states() -> dict[str, str]:
        entries = deployment.statefile()["components"]
        return {name: each["state"] for name, each in entries.items() if each["component"] == "VllmWorker"}

    # The base entry stays when its worker is gone.
    wait_until(lambda: states() == {"dynamo_VllmWorker": "stopped", "dynamo_VllmWorker_1": "ready"})
    assert "ended unasked" not in deployment.text
    assert deployment.workers()["dynamo_VllmWorker_1"]["restarts_s"] == []


BROKEN = ("--VllmWorker.engine=llamacpp", "--drain-timeout", "2")


def broken_model(directory: Path) -> Path:
    """A GGUF file without a model in it, which llama.cpp never loads."""
    path = directory / "broken.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(200))
    return path


@pytest.mark.slow
def test_that_the_only_worker_can_never_start_is_said_and_clients_get_the_reason(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    model = f"--Common.model={broken_model(tmp_path)}"
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET, *BROKEN, model, wait=False)
    wait_until(lambda: "No VllmWorker can start: llamacpp exited" in deployment.text, 60)
    assert "dynamo_VllmWorker.log" in deployment.text

    def answer() -> str:
        body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"{deployment.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=10)
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"
        except OSError:
            pass
        return ""

    told = wait_until(answer, 60)
    assert told.startswith("503 ")
    assert "VllmWorker cannot start: llamacpp exited with 2 while starting: " in told
    assert "see `dynaplan logs dynamo_VllmWorker`" in told


@pytest.mark.slow
def test_with_exit_on_failure_it_ends_with_78_and_leaves_nothing(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    options = (*QUIET, *BROKEN, f"--Common.model={broken_model(tmp_path)}", "--exit-on-failure")
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *options, wait=False)
    assert deployment.process
    assert deployment.process.wait(90) == 78, deployment.text
    assert not deployment.statefile_path.exists()
