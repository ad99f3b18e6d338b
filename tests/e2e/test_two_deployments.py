"""Two deployments on one machine: each knows the other's name, and one command shows both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.traces import in_torture
from tests.fakes.load import Load
from tests.fakes.polling import wait_until

AGGREGATED = ("graphs.agg:Frontend", "agg.yaml", "--Planner.no-operation=true")


@pytest.mark.timeout(300)
def test_each_is_told_apart_and_named_where_it_is_in_the_way(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    one = deploy(*AGGREGATED, "--gpus", "2", namespace="one")
    two = deploy(*AGGREGATED, "--gpus", "2", namespace="two")
    assert one.process
    assert two.process

    both = one.run("status").stdout
    assert f"one  {one.url}  serve runs as pid {one.process.pid}" in both
    assert f"two  {two.url}  serve runs as pid {two.process.pid}" in both
    assert "two_VllmWorker" in both
    documents = json.loads(one.run("status", "--json").stdout)["deployments"]
    assert [document["namespace"] for document in documents] == ["one", "two"]
    for command in (["logs"], ["stop"]):
        refused = one.run(*command)
        assert refused.returncode == 2, refused.stdout
        assert "several deployments are running: one, two" in refused.stderr

    third = ("serve", *AGGREGATED[:1], "-f", AGGREGATED[1], "--namespace", "three", "--gpus")
    refused = one.run(*third, "3", "--port", two.url.rpartition(":")[2])
    assert refused.returncode == 2
    assert f"is taken by pid {two.process.pid} (dynaplan serve, namespace two)" in refused.stderr
    refused = one.run(*third, "2", "--port", "0")
    assert refused.returncode == 2
    assert f"GPU 0: claimed by deployment 'one' (serve pid {one.process.pid}, user " in refused.stderr

    elsewhere = {**one.environment, "DYN_LOCAL_STATE_DIR": str(tmp_path / "nothing")}
    one.environment, before = elsewhere, one.environment
    nothing = one.run("status")
    one.environment = before
    assert nothing.returncode == 2
    assert "There is deployment 'two' of user " in nothing.stderr
    assert f"DYN_LOCAL_STATE_DIR={tmp_path / 'state'} shows it" in nothing.stderr


@in_torture
@pytest.mark.timeout(600)
async def test_a_gpu_goes_to_the_higher_priority_while_it_needs_it_and_no_request_is_lost(
    deploy: Callable[..., Deployment],
) -> None:
    three = ("--gpus", "4", "--VllmWorker.ServiceArgs.workers=3", "--Planner.reserved-gpus=2")
    one = deploy(*AGGREGATED, *three, namespace="one")
    two = deploy(*AGGREGATED, "--gpus", "4", "--Planner.gpu-priority=5", namespace="two")
    async with Load(one.url, MODEL, clients=6, tokens=100) as load:
        await asyncio.to_thread(two.scale, decode=2)
        await load.stop()
    assert load.outcomes
    assert load.incomplete == []
    gpus = {namespace.namespace: gpus_of(namespace) for namespace in (one, two)}
    assert {name: len(held) for name, held in gpus.items()} == {"one": 2, "two": 2}
    assert not gpus["one"] & gpus["two"]
    why = "deployment 'two' needs its GPU (gpu-priority 5 over 0)"
    assert f"one_VllmWorker_2 leaves when its requests are done: {why}" in one.text
    assert f"one_VllmWorker_2 was told to leave: {why}" in one.run("why", "--namespace", "one").stdout
    assert "deployment 'one' is to give one (gpu-priority 5 over 0)" in two.text
    assert "GPU 2,3: claimed by deployment 'two'" in one.run("status", "--namespace", "one").stdout

    refused = two.run("scale", "decode=3", "--namespace", "two", "--timeout", "10")
    assert refused.returncode == 1
    assert "it keeps reserved-gpus 2" in two.run("status", "--namespace", "two").stdout
    assert two.process
    two.process.kill()
    wait_until(lambda: len(gpus_of(one)) == 3, 60)
    wait_until(lambda: all(each["state"] == "ready" for each in one.workers("VllmWorker").values()), 60)


def gpus_of(deployment: Deployment) -> set[int]:
    """The GPUs that its workers hold, by the statefile."""
    workers = deployment.workers("VllmWorker").values()
    return {gpu for each in workers for gpu in each["resources"].get("allocated_gpus", [])}
