"""Scaling a namespace whose ``serve`` runs on another host."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dynaplan.cli.main import group
from dynaplan.store.file_store import FileStore
from tests.unit.cli.scaling.test_scale import FLEET


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    return {"DYN_FILE_KV": str(tmp_path / "kv"), "DYN_LOCAL_STATE_DIR": str(tmp_path / "state")}


def scaled(environment: dict[str, str], *arguments: str) -> Result:
    arguments = ("scale", *arguments, "--namespace", "ns", "--store", "file")
    return CliRunner().invoke(group, arguments, env={**environment, "DYN_DISCOVERY_BACKEND": None})


def keys(environment: dict[str, str], **written: str) -> dict[str, str]:
    """Write keys of the namespace; return all."""

    async def read() -> dict[str, str]:
        store = FileStore.from_environment(environment)
        for name, value in written.items():
            await store.put(f"v1/ns/{name.replace('__', '/')}", value)
        items = await store.list("v1/ns/planner/")
        await store.close()
        return {item.key.removeprefix("v1/ns/planner/"): item.value for item in items}

    return asyncio.run(read())


def test_a_namespace_of_which_no_serve_is_known_is_not_scaled(environment: dict[str, str]) -> None:
    result = scaled(environment, "decode=2")
    assert result.exit_code != 0
    assert "no `dynaplan serve` of namespace ns is known to the store" in str(result.exception)
    assert keys(environment) == {}


def test_counts_are_written_and_their_acknowledgement_is_awaited(environment: dict[str, str]) -> None:
    keys(environment, fleet=FLEET, planner__num_decode_workers="1", planner__decision_id="1")
    result = scaled(environment, "decode=2", "--no-wait")
    assert result.output == "asked for decode=2 (decision 2)\n"
    assert keys(environment)["num_decode_workers"] == "2"
    late = scaled(environment, "decode=+1", "--timeout", "0.2")
    assert "not acknowledged within 0.2 s" in str(late.exception)
    acknowledging = threading.Timer(0.5, lambda: keys(environment, planner__scaled_decision_id="9"))
    acknowledging.start()
    done = scaled(environment, "decode=2")
    acknowledging.join()
    assert done.output.splitlines()[-1] == "carried out"


def test_without_a_store_a_deployment_must_run_here(environment: dict[str, str]) -> None:
    state = {"DYN_LOCAL_STATE_DIR": environment["DYN_LOCAL_STATE_DIR"]}
    result = CliRunner().invoke(group, ("scale", "decode=2", "--namespace", "ns"), env=state)
    assert "no deployment ns is running here" in str(result.exception)
