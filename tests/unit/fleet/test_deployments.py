"""Finding the running deployment: what a user is told when there is none."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dynaplan.fleet import gpu_claims
from dynaplan.fleet.deployments import find_deployment, find_deployments, port_holder
from dynaplan.fleet.gpu_claims import NodeClaims
from dynaplan.fleet.runtime_dir import hold_port
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.process_table import identity_of
from dynaplan.util.errors import ConfigError, DeploymentError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(directory))
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    return directory


def write(state: Path, namespace: str, arbiter: ProcessIdentity, port: int = 8000) -> None:
    """Write the statefile of a deployment whose ``serve`` is that process."""
    document = {
        "namespace": namespace,
        "circus_endpoint": "ipc:///none",
        "components": {},
        "arbiter": asdict(arbiter),
        "addresses": {"frontend_url": f"http://127.0.0.1:{port}"},
    }
    (state / f"{namespace}.json").write_text(json.dumps(document))


SELF = identity_of(os.getpid())
DEAD = replace(SELF, started_at=SELF.started_at - 1)


@pytest.mark.parametrize("namespace", [None, "mine"])
@pytest.mark.parametrize("torn", ["", '{"namespace": "mi', "[]"])
def test_a_torn_statefile_is_named_with_what_comes_of_it(
    state: Path, namespace: str | None, torn: str
) -> None:
    (state / "mine.json").write_text(torn)
    with pytest.raises(DeploymentError) as raised:
        find_deployment(namespace)
    assert f"{state / 'mine.json'}: it is " in str(raised.value)
    assert "`dynaplan serve` sets it aside" in str(raised.value)


def test_where_there_is_no_statefile_none_is_named(state: Path) -> None:
    (state / ".startup_times.json").write_text("{}")
    with pytest.raises(DeploymentError) as raised:
        find_deployment()
    assert "sets it aside" not in str(raised.value)


def test_all_that_run_are_found_and_a_command_for_one_asks_which(state: Path) -> None:
    for namespace in ("dynamo", "two"):
        write(state, namespace, SELF)
    write(state, "gone", DEAD)
    assert [found.namespace for found in find_deployments()] == ["dynamo", "two"]
    with pytest.raises(DeploymentError, match=r"running: dynamo, two\n.*--namespace"):
        find_deployment()


def test_a_statefile_that_has_outlived_its_deployment_is_named(state: Path) -> None:
    write(state, "gone", DEAD)
    with pytest.raises(DeploymentError) as raised:
        find_deployments()
    assert f"{state / 'gone.json'} is left of a deployment gone" in str(raised.value)
    assert f"serve was pid {DEAD.pid}" in str(raised.value)


def test_a_deployment_with_its_statefile_elsewhere_is_named_with_the_way_to_see_it(
    state: Path, tmp_path: Path
) -> None:
    parent = identity_of(os.getppid())
    NodeClaims(parent, "two", tmp_path / "node").claim(["GPU-SIM-0"])
    with pytest.raises(DeploymentError) as raised:
        find_deployment()
    assert "There is deployment 'two' of " in str(raised.value)
    assert f"(serve pid {parent.pid})" in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"HOME": "/srv/bob"}, "DYN_LOCAL_STATE_DIR=/srv/bob/.dynamo/state shows it"),
        ({"HOME": "/srv/bob", "DYN_LOCAL_STATE_DIR": "~/s"}, "DYN_LOCAL_STATE_DIR=/srv/bob/s shows it"),
        ({"HOME": "/srv/bob", "DYN_LOCAL_STATE_DIR": "/var/s"}, "DYN_LOCAL_STATE_DIR=/var/s shows it"),
        ({"HOME": "/srv/bob", "DYN_LOCAL_STATE_DIR": "relative"}, ""),
        ({"HOME": "/srv/bob", "DYN_LOCAL_STATE_DIR": "SEARCHED"}, ""),
        ({}, ""),
    ],
)
def test_another_deployments_directory_is_by_its_own_home_or_is_not_named(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], shown: str
) -> None:
    parent = identity_of(os.getppid())
    NodeClaims(parent, "two", tmp_path / "node").claim(["GPU-SIM-0"])
    theirs = {name: value.replace("SEARCHED", str(state)) for name, value in environment.items()}
    monkeypatch.setattr(gpu_claims, "environment_of", lambda pid: theirs)
    with pytest.raises(DeploymentError) as raised:
        find_deployment()
    line = next(line for line in str(raised.value).splitlines() if "There is deployment 'two'" in line)
    assert line.endswith(f"(serve pid {parent.pid}); {shown}." if shown else f"(serve pid {parent.pid}).")


def test_a_deployment_began_with_its_arbiter(state: Path) -> None:
    write(state, "mine", SELF)
    assert 0 <= time.time() - find_deployment("mine").began_s < 3600


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_told_from_a_port_that_is_taken(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--host {host}: .*\n  Expected an address of this machine"):
        hold_port(host, 0, port_holder)


def test_the_holder_of_a_port_is_named_before_it_listens(state: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        write(state, "two", SELF, port)
        with pytest.raises(ConfigError) as raised:
            hold_port("127.0.0.1", port, port_holder)
    text = f"port {port} of 127.0.0.1 is taken by pid {SELF.pid} (dynaplan serve, namespace two)"
    assert text in str(raised.value)
    assert "0 lets the kernel choose" in str(raised.value)
