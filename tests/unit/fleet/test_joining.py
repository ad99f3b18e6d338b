from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dynaplan.runtime
from dynaplan.fleet.joining import connect
from dynaplan.util.errors import ConfigError, DeploymentError, QueueUnavailable, StoreUnavailable
from tests.fakes.certificates import Authority


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


async def test_a_store_that_the_environment_names_is_joined_where_no_deployment_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", f"unix://{tmp_path}/nobody:1")
    with pytest.raises(StoreUnavailable, match="nobody:1 does not answer"):
        async with connect():
            pass


async def test_events_beside_a_store_in_memory_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NATS_SERVER", raising=False)
    async with connect(store="mem") as runtime:
        with pytest.raises(QueueUnavailable, match="no event plane: events travel through a NATS server"):
            await runtime.event_plane()


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


def own_address() -> str:
    """An address of this machine that is not loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


async def words(_: object) -> AsyncIterator[str]:
    yield "hello"


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_program_with_an_address_is_called_there(
    is_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = own_address()
    monkeypatch.setenv("DYNAPLAN_WORKER_TOKEN", "a-token-of-the-namespace")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "kv"))
    if is_tls:
        authority = Authority(tmp_path / "certificates")
        files = authority.issue("own", f"subjectAltName=IP:{host}")
        monkeypatch.setenv("DYNAPLAN_TLS_CERT", str(files.certificate))
        monkeypatch.setenv("DYNAPLAN_TLS_KEY", str(files.key))
        monkeypatch.setenv("DYNAPLAN_TLS_CA", str(authority.certificate))
    async with connect("ns", store="file", advertise_host=host) as runtime:
        endpoint = runtime.namespace().component("backend").endpoint("generate")
        serving = asyncio.create_task(endpoint.serve(words))
        client = await endpoint.client()
        await client.wait_for_instances()
        (instance,) = (await runtime.discovery("ns")).instances("backend")
        assert instance.url.startswith(f"{'https' if is_tls else 'http'}://{host}:")
        assert [word async for word in client.round_robin({})] == ["hello"]
        runtime.leave("the test is over")
        await serving


async def test_a_program_has_an_address_only_with_a_token_that_others_know() -> None:
    with pytest.raises(ConfigError, match="the namespace's token must be named"):
        async with connect(store="mem", advertise_host="192.0.2.9"):
            pass
