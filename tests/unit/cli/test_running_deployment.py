"""How a command finds the deployment: by ``--store`` and the environment, or by its statefile."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from dynaplan.cli import running_deployment
from dynaplan.cli.main import main
from dynaplan.cli.options import store_option
from dynaplan.cli.running_deployment import find_store, make_paths_absolute
from dynaplan.config.settings.servers import BACKEND_VARIABLE
from dynaplan.fleet import deployments
from dynaplan.util.errors import ConfigError, DeploymentError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the environment without a store, thrown away afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in (BACKEND_VARIABLE, "ETCD_ENDPOINTS", "NATS_SERVER", "DYN_FILE_KV"):
        os.environ.pop(name, None)


@click.command
@store_option
def joining() -> None:
    found = find_store("ns")
    click.echo(f"{found.namespace if found else 'named'} by {os.environ.get(BACKEND_VARIABLE)}")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(joining, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def running(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    """A deployment runs here, and uses that store."""

    def connect(namespace: str) -> Any:
        os.environ[BACKEND_VARIABLE] = store
        return SimpleNamespace(namespace=namespace)

    monkeypatch.setattr(running_deployment, "connect", connect)
    monkeypatch.setattr(deployments, "find_deployments", lambda _: [SimpleNamespace(namespace="ns")])


def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_deployments(namespace: str) -> Any:
        raise DeploymentError("no deployment is running here")

    monkeypatch.setattr(deployments, "find_deployments", find_deployments)


def test_the_running_deployment_is_found_when_no_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, "file")
    assert run().output == "ns by file\n"
    os.environ[BACKEND_VARIABLE] = "etcd"
    assert run().output == "ns by file\n"


@pytest.mark.parametrize(
    ("arguments", "variable", "backend"),
    [([], "ETCD_ENDPOINTS", None), (["--store", "nats"], "NATS_SERVER", "nats")],
)
def test_a_store_whose_place_is_named_comes_first(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str, backend: str | None
) -> None:
    running(monkeypatch, "file")
    os.environ[variable] = "there"
    assert run(*arguments).output == f"named by {backend}\n"


def test_where_nothing_runs_the_option_means_the_stores_usual_place(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_runs(monkeypatch)
    assert run("--store", "kv_store").output == "named by etcd\n"
    with pytest.raises(DeploymentError):
        run()


def test_the_option_chooses_none_of_several_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [SimpleNamespace(namespace=name) for name in ("a", "b")]
    monkeypatch.setattr(deployments, "find_deployments", lambda _: both)
    for arguments in ([], ["--store", "file"]):
        with pytest.raises(DeploymentError, match="several deployments are running: a, b"):
            run(*arguments)


def test_another_store_than_the_deployments_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, "etcd")
    with pytest.raises(ConfigError, match=r"--store file: ns.* uses etcd"):
        run("--store", "file")


@pytest.mark.parametrize("command", [["serve", "graphs.agg:Frontend"], ["planner"]])
@pytest.mark.parametrize("word", ["mem", "flie"])
@pytest.mark.parametrize("is_option", [True, False])
def test_a_store_that_cannot_be_used_is_one_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], command: list[str], word: str, is_option: bool
) -> None:
    if not is_option:
        os.environ[BACKEND_VARIABLE] = word
    with pytest.raises(SystemExit) as ended:
        main([*command, *(["--store", word] if is_option else [])])
    assert ended.value.code == 2
    where = "--store" if is_option else BACKEND_VARIABLE
    assert capsys.readouterr().err.startswith(f"Error: {where} is '{word}'")


def test_paths_in_the_environment_survive_a_change_of_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    os.environ.update({"DYN_FILE_KV": "kv", "ETCD_AUTH_CA": "/etc/ca.pem", "ETCD_AUTH_CLIENT_KEY": "~/key"})
    make_paths_absolute()
    assert os.environ["DYN_FILE_KV"] == str(tmp_path / "kv")
    assert os.environ["ETCD_AUTH_CA"] == "/etc/ca.pem"
    assert os.environ["ETCD_AUTH_CLIENT_KEY"] == os.path.expanduser("~/key")
    assert "ETCD_AUTH_CLIENT_CERT" not in os.environ
