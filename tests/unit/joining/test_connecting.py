from __future__ import annotations

from pathlib import Path

import pytest

import dynaplan.runtime
from dynaplan.domain.errors import ConfigError, DeploymentError, StoreUnavailable
from dynaplan.joining.connecting import connect


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without deployments, in a shell without addresses."""
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    for name in ("DYNAPLAN_WORKER_TOKEN", "DYN_NAMESPACE", "ETCD_ENDPOINTS", "DYN_DISCOVERY_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def test_the_runtime_has_it_by_name_and_nothing_else_of_it() -> None:
    assert dynaplan.runtime.connect is connect
    with pytest.raises(AttributeError, match="no attribute 'disconnect'"):
        dynaplan.runtime.disconnect  # type: ignore[attr-defined]  # noqa: B018


async def test_two_of_one_process_share_the_store_in_memory() -> None:
    async with connect("ns", store="mem") as first, connect(store="mem") as second:
        await first.store.put("/key", "value")
        found = await second.store.get("/key")
        assert found is not None and found.value == "value"
        assert (first.namespace().name, second.namespace().name) == ("ns", "dynamo")
        assert first.token == second.token
        assert first.token not in repr(first)
    async with connect(store="mem") as third:
        assert await third.store.get("/key") is not None


async def test_without_a_deployment_it_says_so() -> None:
    with pytest.raises(DeploymentError, match="no deployment is running here"):
        async with connect():
            pass
    with pytest.raises(DeploymentError, match="no deployment box is running here"):
        async with connect("box"):
            pass


async def test_a_store_by_name_needs_the_token() -> None:
    with pytest.raises(ConfigError, match="token is missing"):
        async with connect(store="etcd"):
            pass


async def test_a_store_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="zookeeper"):
        async with connect(store="zookeeper"):
            pass


async def test_a_store_that_does_not_answer_is_worth_a_retry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", f"unix://{tmp_path}/nobody:1")
    (tmp_path / "token").write_text("secret-secret-secret\n")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(StoreUnavailable, match="nobody:1 does not answer"):
        async with connect(token_file=tmp_path / "token"):
            pass


async def test_a_token_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        async with connect(token_file=tmp_path / "missing"):
            pass
    (tmp_path / "empty").touch(mode=0o600)
    with pytest.raises(ConfigError, match="does not hold a token"):
        async with connect(token_file=str(tmp_path / "empty")):
            pass
