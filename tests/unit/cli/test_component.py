"""Joining a namespace: whose token, which store, and what is refused."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import click
import pytest

from dynaplan.cli import join
from dynaplan.cli.component import (
    Component,
    check_component,
    config_for,
    refuse_another_model,
)
from dynaplan.cli.join import JoinedNamespace
from dynaplan.store import connections
from dynaplan.store.instances import Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, DeploymentError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without any deployment."""
    for name in list(os.environ):
        if name.startswith(("ETCD_", "NATS_", "DYN_", "DYNAPLAN_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    # What joining sets is taken back.
    for name in ("DYN_NAMESPACE", "DYNAPLAN_WORKER_TOKEN"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A store that outlives the connections of the test."""
    made = MemoryStore(SystemClock())
    monkeypatch.setattr(made, "close", lambda: asyncio.sleep(0))
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:2379")
    monkeypatch.setattr(connections, "connect_store", lambda: made)
    return made


def joined(namespace: str | None = "box", token_file: Path | None = None) -> join.JoinedNamespace:
    with click.Context(click.Command("worker")):
        return join.join(namespace, token_file)


def token_file(directory: Path, text: str = "0123456789abcdef-of-a-file") -> Path:
    path = directory / "token"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path


def test_without_a_deployment_and_without_a_store_it_says_what_brings_one() -> None:
    with pytest.raises(
        DeploymentError, match=r"no deployment box is running.*\n.*dynaplan serve GRAPH(.*\n)+.*--store file"
    ):
        joined()


def test_the_first_component_makes_the_token_that_the_later_ones_find(
    store: MemoryStore, tmp_path: Path
) -> None:
    first = joined()
    token = os.environ["DYNAPLAN_WORKER_TOKEN"]
    kept = tmp_path / "state" / "box.token"
    assert (first.namespace, first.deployment, first.config) == ("box", None, {})
    assert kept.read_text().strip() == token
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    os.environ["DYNAPLAN_WORKER_TOKEN"] = ""
    joined()
    assert os.environ["DYNAPLAN_WORKER_TOKEN"] == token
    assert "http://127.0.0.1:2379" in first.where


def test_a_token_of_a_file_or_of_the_environment_is_not_kept(store: MemoryStore, tmp_path: Path) -> None:
    joined(token_file=token_file(tmp_path))
    assert os.environ["DYNAPLAN_WORKER_TOKEN"] == "0123456789abcdef-of-a-file"
    os.environ["DYNAPLAN_WORKER_TOKEN"] = "of-the-environment"
    joined()
    assert os.environ["DYNAPLAN_WORKER_TOKEN"] == "of-the-environment"
    assert not (tmp_path / "state" / "box.token").exists()


@pytest.mark.parametrize("text", ["", "short", "two words that are long enough", "ümlaut-0123456789abcdef"])
def test_a_file_without_a_token_is_refused(store: MemoryStore, tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="does not hold a token"):
        joined(token_file=token_file(tmp_path, text))


def test_a_token_that_others_can_read_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    path = token_file(tmp_path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"other users can read.*\n.*chmod 600 {path}"):
        joined(token_file=path)
    with pytest.raises(ConfigError, match="No such file"):
        joined(token_file=tmp_path / "nowhere")


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:1")
    with pytest.raises(DeploymentError, match="the store does not answer"):
        joined()


def test_a_process_of_serve_leaves_nothing_of_its_own_to_a_component(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAPLAN_PARENT_PID", "1")
    monkeypatch.setenv("DYNAPLAN_LOG_DIR", "/nowhere")
    joined()
    assert not {"DYNAPLAN_PARENT_PID", "DYNAPLAN_LOG_DIR"} & os.environ.keys()


WORKER = "VllmWorker"


def checked_component(
    section: dict[str, object], config: dict[str, dict[str, object]] | None = None
) -> Component:
    return check_component(WORKER, config or {}, section, "box")


def test_flags_come_over_the_file_and_the_file_over_what_the_deployment_has(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("VllmWorker: {model: of-the-file, seed: 2}\nPlanner: {no-operation: true}\n")
    deployed = {WORKER: {"model": "deployed", "max_num_seqs": 3, "ServiceArgs": {"workers": 4}}}
    config = config_for(str(file), ["--VllmWorker.seed=5"], JoinedNamespace("box", config=deployed))
    made = checked_component({"model": "of-a-flag"}, config)
    assert made.config[WORKER] == {
        "model": "of-a-flag",
        "seed": 5,
        "max_num_seqs": 3,
        "ServiceArgs": {},
    }
    assert (made.spec.services[0].workers, made.spec.services[0].gpus) == (1, 1)
    assert made.worker_name.endswith(f"_{os.getpid()}")


def test_a_component_bears_a_file_with_automatic_frontends() -> None:
    made = checked_component({}, {"Frontend": {"ServiceArgs": {"workers": "auto"}}})
    assert made.name == WORKER


def test_an_option_is_checked_as_its_own_process_would() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        checked_component({"max-num-seqs": "many"})
    assert checked_component({"ServiceArgs": {"resources": {"gpu": "0.5"}}}).spec.services[0].gpus == 0.5


def test_a_worker_with_another_model_than_those_of_its_namespace_is_refused() -> None:
    there = Instance("box", WORKER, "generate", 7, "", worker="box_VllmWorker", card={"model": "llama"})
    joined = JoinedNamespace("box", instances=(there,))
    refuse_another_model(checked_component({"model": "llama"}), joined)
    refuse_another_model(checked_component({"model": "x", "served-model-name": "llama"}), joined)
    refuse_another_model(checked_component({"model": "other"}), JoinedNamespace("box"))
    for section in ({"model": "other"}, {}):
        with pytest.raises(ConfigError, match=r"box_VllmWorker of namespace box serves llama"):
            refuse_another_model(checked_component(section), joined)
