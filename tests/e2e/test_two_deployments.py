"""Two deployments on one machine: each knows the other's name, and one command shows both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment

AGGREGATED = ("graphs.agg:Frontend", "agg.yaml", "--Planner.no-operation=true")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_is_told_apart_and_named_where_it_is_in_the_way(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    one = deploy(*AGGREGATED, "--gpus", "2", namespace="one")
    two = deploy(*AGGREGATED, "--gpus", "2", namespace="two")
    assert one.process
    assert two.process

    both = one.run("status").stdout
    for each in (one, two):
        assert re.search(rf"{each.url}  serve runs as pid \d+, its supervisor as {each.process.pid},", both)
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
