"""What stands in the way of a deployment is named before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynaplan.fleet.gpu_claims import NodeClaims
from dynaplan.fleet.gpu_devices import simulated
from dynaplan.fleet.preparation import ServeOptions, first_workers, prepare
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import CapacityError, ConfigError

GRAPH = GraphSpec("graphs.agg:Frontend", "/srv/project", "ns", (ServiceSpec("Worker", Role.DECODE, gpus=1),))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_claims_that_cannot_be_used_are_told_from_gpus_that_others_have(
    tmp_path: Path, stack: ExitStack
) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node").chmod(0o777)
    claims = NodeClaims(ProcessIdentity(1, 1, "boot"), "ns", tmp_path / "node")
    with pytest.raises(CapacityError, match=f"GPU 0,1: everybody may remove files from {tmp_path}/node"):
        first_workers(GRAPH, simulated(2), lambda: claims, stack, uses_busy=False)


@pytest.mark.parametrize("text", ["abc", "-1", "0", "65536", "1e3"])
def test_a_port_of_circus_that_is_none_is_refused_before_anything_is_taken(
    text: str, monkeypatch: pytest.MonkeyPatch, state_dir: Path, stack: ExitStack
) -> None:
    monkeypatch.setenv("DYN_CIRCUS_ENDPOINT_PORT", text)
    with pytest.raises(ConfigError, match=f"DYN_CIRCUS_ENDPOINT_PORT is '{text}'"):
        prepare(GRAPH, {}, ServeOptions(circus_tcp=True), stack)
    assert not state_dir.exists()


def test_a_machine_without_free_ports_is_told_which_variable_names_one(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.setenv("DYN_CIRCUS_ENDPOINT_PORT", "5555")
    monkeypatch.delenv("DYN_CIRCUS_PUBSUB_PORT", raising=False)
    monkeypatch.setattr("dynaplan.util.sockets.is_free", lambda port: False)
    with pytest.raises(ConfigError, match=r"no free loopback port found\n.*DYN_CIRCUS_PUBSUB_PORT"):
        prepare(GRAPH, {}, ServeOptions(circus_tcp=True), stack)
