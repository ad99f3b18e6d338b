"""An etcd as an operator secures it: TLS with client certificates, and users with passwords.

A plugin of pytest: a module's tests share one ``secured_etcd``. Its certificates come from the ``openssl``
command, which must be there. ``environment`` is for a client that may do everything that dynaplan does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dynaplan.fleet.servers import find_etcd
from dynaplan.process.guard import guard_command
from dynaplan.store.etcd_gateway import EtcdGateway, key_range, tls_context
from dynaplan.util.errors import StoreUnavailable
from dynaplan.util.sockets import free_port
from tests.fakes.certificates import Authority
from tests.fakes.polling import eventually

PREFIXES = ("/", "v1/")
"""What a user of dynaplan's must be able to read and write: docs/guides/event-plane.md says so."""


class SecuredEtcd:
    """One etcd on a loopback port. ``certificates`` holds its authority and certificates of two more."""

    def __init__(self, directory: Path) -> None:
        self.certificates = directory / "certificates"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._port, self._peer_port = free_port(), free_port()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ETCD_ENDPOINTS": f"https://127.0.0.1:{self._port}",
            "ETCD_AUTH_USERNAME": "dynaplan",
            "ETCD_AUTH_PASSWORD": "the right one",
            "ETCD_AUTH_CA": str(self.certificates / "authority.pem"),
            "ETCD_AUTH_CLIENT_CERT": str(self.certificates / "client.pem"),
            "ETCD_AUTH_CLIENT_KEY": str(self.certificates / "client.key"),
        }

    def start(self) -> None:
        self._make_certificates()
        client, peer = f"https://127.0.0.1:{self._port}", f"http://127.0.0.1:{self._peer_port}"
        options = {
            "name": "secured",
            "data-dir": "data",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"secured={peer}",
            "cert-file": "certificates/server.pem",
            "key-file": "certificates/server.key",
            "trusted-ca-file": "certificates/authority.pem",
            "log-level": "error",
            "bcrypt-cost": "4",  # at the default, checking a password takes seconds on a busy machine
        }
        command = [find_etcd()[0], "--client-cert-auth", *(f"--{key}={options[key]}" for key in options)]
        log = self._directory / "etcd.log"
        self._process = subprocess.Popen(guard_command(command, os.getpid(), log=log), cwd=self._directory)
        asyncio.run(self._add_users())

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    async def add_user(self, gateway: EtcdGateway, name: str, permission: str) -> None:
        """Add a user, password ``the right one``, with a role of its own."""
        await gateway.call("/v3/auth/user/add", {"name": name, "password": "the right one"})
        await gateway.call("/v3/auth/role/add", {"name": name})
        for prefix in PREFIXES:
            granted = {"permType": permission, **key_range(prefix)}
            await gateway.call("/v3/auth/role/grant", {"name": name, "perm": granted})
        await gateway.call("/v3/auth/user/grant", {"user": name, "role": name})

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Answer nothing meanwhile, not even the end of a connection."""
        process = psutil.Process(self._process.pid if self._process else 0)
        process.suspend()
        try:
            yield
        finally:
            process.resume()

    def connections(self) -> list[str]:
        """The states of this process's connections to it."""
        mine = psutil.Process().net_connections("tcp")
        return [each.status for each in mine if each.raddr and each.raddr.port == self._port]

    def gateway_of_root(self) -> EtcdGateway:
        environment = self.environment
        credentials = ("root", "the right one")
        return EtcdGateway(
            (environment["ETCD_ENDPOINTS"],), credentials=credentials, tls=tls_context(environment)
        )

    async def _add_users(self) -> None:
        gateway = EtcdGateway((self.environment["ETCD_ENDPOINTS"],), tls=tls_context(self.environment))

        async def answers() -> bool:
            try:
                return bool(await gateway.call("/v3/kv/range", {"key": "YQ=="}))
            except StoreUnavailable:
                return False

        await eventually(answers)
        await self.add_user(gateway, "root", "READWRITE")
        await gateway.call("/v3/auth/role/add", {"name": "administrators"})
        await gateway.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
        await self.add_user(gateway, "dynaplan", "READWRITE")
        await self.add_user(gateway, "reader", "READ")
        await gateway.call("/v3/auth/enable", {})
        await gateway.close()

    def _make_certificates(self) -> None:
        authority = Authority(self.certificates)
        Authority(self.certificates, "other")
        # etcd's gateway is a client of etcd itself, with the server's certificate.
        names = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth"
        for name, subject in (("server", "/CN=etcd"), ("client", "/O=dynaplan"), ("named", "/CN=somebody")):
            authority.issue(name, names, subject=subject)


@pytest.fixture(scope="module")
def secured_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredEtcd]:
    """A running etcd with users ``dynaplan``, ``reader`` (which may not write) and ``root``."""
    server = SecuredEtcd(tmp_path_factory.mktemp("secured"))
    try:
        server.start()
        yield server
    finally:
        server.close()
