"""The servers that a deployment starts: those that its store and its graph need, and no others."""

from __future__ import annotations

import resource
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynaplan.config.settings.servers import BACKEND_VARIABLE
from dynaplan.fleet import servers
from dynaplan.fleet.servers import OwnPlaces, SharedServers, shared_servers
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.util.errors import ConfigError, UserError

AGGREGATED = (Role.FRONTEND, Role.DECODE)
DISAGGREGATED = (*AGGREGATED, Role.PREFILL)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was checked; the environment names no server."""
    for name in (BACKEND_VARIABLE, "ETCD_ENDPOINTS", "NATS_SERVER", "DYN_FILE_KV", "DYN_EVENT_PLANE"):
        monkeypatch.delenv(name, raising=False)
    found: list[str] = []

    async def check_nats(environ: Any, stream: str) -> None:
        found.append(f"nats {stream}".strip())

    async def check_store(environ: Any, namespace: str) -> None:
        found.append(f"store of {namespace}")

    monkeypatch.setattr(servers, "check_external_nats", check_nats)
    monkeypatch.setattr(servers, "check_external_store", check_store)
    return found


def servers_of(roles: tuple[Role, ...], directory: Path, **config: Any) -> SharedServers:
    services = tuple(ServiceSpec(role.value, role) for role in roles)
    graph = GraphSpec("graph:Entry", str(directory), "ns", services)
    scratch = directory / "scratch"
    scratch.mkdir(mode=0o700, exist_ok=True)
    return shared_servers(graph, config, OwnPlaces(directory, directory, scratch))


def started(roles: tuple[Role, ...], directory: Path, **config: Any) -> list[str]:
    return [server.name for server in servers_of(roles, directory, **config).started]


@pytest.mark.parametrize(
    ("backend", "roles", "names"),
    [
        ("", AGGREGATED, ["etcd"]),
        ("etcd", DISAGGREGATED, ["etcd", "nats"]),
        ("file", AGGREGATED, []),
        ("file", DISAGGREGATED, ["nats"]),
        ("nats", AGGREGATED, ["nats"]),
        ("nats", DISAGGREGATED, ["nats"]),
    ],
)
def test_a_server_is_started_for_the_store_and_for_prefill_workers(
    monkeypatch: pytest.MonkeyPatch,
    runtime_dir: Path,
    backend: str,
    roles: tuple[Role, ...],
    names: list[str],
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    assert started(roles, runtime_dir) == names


@pytest.mark.parametrize("section", ["VllmWorker", "Frontend", "Router", "Processor"])
@pytest.mark.parametrize("key", ["remote-prefill", "remote_prefill"])
def test_frontends_that_use_the_prefill_queue_need_it_without_workers_of_the_graph(
    runtime_dir: Path, section: str, key: str
) -> None:
    assert started(AGGREGATED, runtime_dir, **{section: {key: True}}) == ["etcd", "nats"]
    assert started(AGGREGATED, runtime_dir, **{section: {key: False}}) == ["etcd"]


@pytest.mark.parametrize("section", ["VllmWorker", "Frontend", "Router", "Processor"])
def test_nats_is_started_for_the_events_that_frontends_route_by(runtime_dir: Path, section: str) -> None:
    by_events, by_prediction = {"router": "kv"}, {"router": "kv", "kv-events": False}
    assert started(AGGREGATED, runtime_dir, **{section: by_events}) == ["etcd", "nats"]
    assert started(AGGREGATED, runtime_dir, **{section: by_prediction}) == ["etcd"]
    shared = {**by_prediction, "router_replica_sync": True}
    assert started(AGGREGATED, runtime_dir, **{section: shared}) == ["etcd", "nats"]


@pytest.mark.parametrize(("plane", "names"), [("nats", ["etcd", "nats"]), ("", ["etcd"])])
def test_nats_is_started_where_the_environment_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, plane: str, names: list[str]
) -> None:
    monkeypatch.setenv("DYN_EVENT_PLANE", plane)
    assert started(AGGREGATED, runtime_dir) == names


@pytest.mark.parametrize("variable", ["DYN_EVENT_PLANE", "DYN_NATS_STREAM_MAX_AGE", "DYNAPLAN_COMPAT"])
def test_an_event_plane_that_is_none_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, variable: str
) -> None:
    monkeypatch.setenv(variable, "wrong")
    with pytest.raises(ConfigError, match=f"{variable} is 'wrong'"):
        started(AGGREGATED, runtime_dir)


def test_without_nats_every_process_is_told_so_and_the_store_is_named(runtime_dir: Path) -> None:
    environment = servers_of(AGGREGATED, runtime_dir).environment
    assert environment["NATS_SERVER"] == ""
    assert environment[BACKEND_VARIABLE] == "etcd"
    assert environment["ETCD_ENDPOINTS"].startswith(f"unix://{runtime_dir}")
    assert servers_of(DISAGGREGATED, runtime_dir).environment["NATS_SERVER"].startswith("nats://127.0.0.1:")


def test_credentials_for_servers_elsewhere_are_not_offered_to_our_own(runtime_dir: Path) -> None:
    environment = servers_of(DISAGGREGATED, runtime_dir).environment
    assert environment["ETCD_AUTH_USERNAME"] == environment["NATS_AUTH_USERNAME"] == ""


def test_a_store_in_files_gets_a_private_directory(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "file")
    servers = servers_of(AGGREGATED, runtime_dir)
    directory = Path(servers.environment["DYN_FILE_KV"])
    assert directory.parent == runtime_dir
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not servers.store_outlives


def test_on_a_network_file_system_that_directory_is_in_memory(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    def connect(environ: Mapping[str, str]) -> None:
        if Path(environ["DYN_FILE_KV"]).parent == runtime_dir:
            raise ConfigError("it is on a network file system (nfs4)")

    monkeypatch.setattr(servers.connections, "connect_store", connect)
    monkeypatch.setenv(BACKEND_VARIABLE, "file")
    assert servers_of(AGGREGATED, runtime_dir).environment["DYN_FILE_KV"] == str(
        runtime_dir / "scratch" / "store"
    )


def test_on_a_full_disk_it_is_in_memory_too(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setattr(servers, "has_room", lambda directory, _: directory != runtime_dir)
    monkeypatch.setenv(BACKEND_VARIABLE, "file")
    assert servers_of(AGGREGATED, runtime_dir).environment["DYN_FILE_KV"] == str(
        runtime_dir / "scratch" / "store"
    )


@pytest.mark.parametrize(
    ("backend", "variable"), [("etcd", "ETCD_ENDPOINTS"), ("nats", "NATS_SERVER"), ("file", "DYN_FILE_KV")]
)
def test_a_named_store_is_checked_and_none_is_started(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, checked: list[str], backend: str, variable: str
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    monkeypatch.setenv(variable, "named")
    servers = servers_of(AGGREGATED, runtime_dir)
    assert servers.started == ()
    assert variable not in servers.environment
    assert servers.store_outlives
    assert "store of ns" in checked


def test_a_named_nats_server_is_checked_and_kept_also_where_the_graph_needs_none(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, checked: list[str]
) -> None:
    monkeypatch.setenv("NATS_SERVER", "nats://box:4222")
    for roles in (AGGREGATED, DISAGGREGATED):
        servers = servers_of(roles, runtime_dir)
        assert [server.name for server in servers.started] == ["etcd"]
        assert "NATS_SERVER" not in servers.environment
    assert checked == ["nats", "nats ns_prefill_queue"]


def test_a_clusters_api_is_no_store_for_processes_that_share_a_pod(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "kubernetes")
    with pytest.raises(ConfigError, match="--store kubernetes"):
        servers_of(AGGREGATED, runtime_dir)


def test_a_store_that_is_not_shared_is_refused(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "mem")
    with pytest.raises(ConfigError, match="file"):
        servers_of(AGGREGATED, runtime_dir)


def test_the_prefill_workers_of_a_model_need_nats_and_a_named_one_is_asked_for_their_queue(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, checked: list[str]
) -> None:
    services = (ServiceSpec("a", Role.DECODE, model="a"), ServiceSpec("a-prefill", Role.PREFILL, model="a"))
    graph = GraphSpec("graph:Entry", str(runtime_dir), "ns", services)
    places = OwnPlaces(runtime_dir, runtime_dir, runtime_dir)
    assert "nats" in [each.name for each in shared_servers(graph, {}, places).started]
    monkeypatch.setenv("NATS_SERVER", "nats://127.0.0.1:4")
    shared_servers(graph, {}, places)
    assert checked == ["nats ns_prefill_queue_a-prefill"]


@pytest.mark.parametrize(
    ("which", "limit", "words"),
    [(resource.RLIMIT_NOFILE, 140, "open files is 140"), (resource.RLIMIT_FSIZE, 2**20, "bytes of a file")],
)
def test_a_limit_of_this_process_that_etcd_does_not_start_with_is_named_beforehand(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, which: int, limit: int, words: str
) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda each: (limit, limit) if each == which else real(each))
    with pytest.raises(UserError, match=words) as caught:
        servers_of(AGGREGATED, runtime_dir)
    assert "--store file" in str(caught.value.hint)
    monkeypatch.setenv(BACKEND_VARIABLE, "file")
    assert started(AGGREGATED, runtime_dir) == []
