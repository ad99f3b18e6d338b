"""What the environment names is what a process connects to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.events.event_connections import connect_events, connect_messenger
from dynaplan.store.connections import connect_store
from dynaplan.store.memory import process_store
from dynaplan.util.errors import ConfigError, QueueUnavailable

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("backend", "store"), [("etcd", "EtcdStore"), ("file", "FileStore"), ("nats", "NatsStore")]
)
async def test_the_store_is_the_one_that_the_environment_names(
    tmp_path: Path, backend: str, store: str
) -> None:
    places = {
        "ETCD_ENDPOINTS": NOWHERE,
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "NATS_SERVER": "nats://127.0.0.1:9",
    }
    found = connect_store({"DYN_DISCOVERY_BACKEND": backend, **places})
    try:
        assert type(found).__name__ == store
    finally:
        await found.close()


def test_outside_a_cluster_its_store_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no credentials for a Kubernetes cluster"):
        connect_store({"DYN_DISCOVERY_BACKEND": "kubernetes"})


def test_a_store_in_memory_is_nobody_else_s_and_another_one_is_named() -> None:
    with pytest.raises(ConfigError, match="that store lives in one process") as caught:
        connect_store({"DYN_DISCOVERY_BACKEND": "mem"})
    assert "Use file" in caught.value.hint
    assert process_store() is process_store()


async def test_a_deployment_without_nats_says_so_instead_of_trying() -> None:
    without = {"NATS_SERVER": ""}
    with pytest.raises(QueueUnavailable, match="has no NATS server"):
        await connect_messenger(without)
    with pytest.raises(QueueUnavailable, match="no NATS server for events"):
        await connect_events(without)
