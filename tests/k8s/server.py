"""A real kube-apiserver on an etcd of its own, with tokens for an administrator and for the planner."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from dynaplan.fleet.servers import find_etcd
from dynaplan.util.sockets import free_port
from tests.fakes.polling import wait_until

DISCOVERY = "system:serviceaccount:default:dynaplan-discovery"
PLANNER = "system:serviceaccount:default:dynaplan-planner"
TOKENS = f"""administrator,admin,1,"system:masters"
planner,{PLANNER},2,"system:serviceaccounts"
discovery,{DISCOVERY},3,"system:serviceaccounts"
"""
KUBECONFIG = """apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: default}}}}]
clusters: [{{name: test, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: test, user: {{token: {token}}}}}]
"""


class ApiServer:
    """The processes; ``stop`` and ``start`` take the server away and bring it back, etcd and its data stay.

    Authorization is by RBAC. The admission of service accounts is off: no controller makes their tokens.
    """

    def __init__(self, binary: Path, directory: Path) -> None:
        self._binary = binary
        self._directory = directory
        self._port, self._etcd_port, peer_port = free_port(), free_port(), free_port()
        (directory / "tokens.csv").write_text(TOKENS)
        key = str(directory / "accounts.key")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        etcd = [
            *(find_etcd()[0], "--data-dir", str(directory / "etcd")),
            *("--listen-client-urls", f"http://127.0.0.1:{self._etcd_port}"),
            *("--advertise-client-urls", f"http://127.0.0.1:{self._etcd_port}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer_port}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer_port}"),
            *("--initial-cluster", f"default=http://127.0.0.1:{peer_port}"),
        ]
        self._etcd = self._spawn("etcd", etcd)
        self._server: subprocess.Popen[bytes] | None = None

    def kubeconfig(self, token: str) -> Path:
        """Write the kubeconfig of ``administrator`` or ``planner``; return its path."""
        path = self._directory / f"{token}.kubeconfig"
        path.write_text(KUBECONFIG.format(port=self._port, token=token))
        return path

    def start(self) -> None:
        """Start the server, and return when it is ready."""
        key = self._directory / "accounts.key"
        command = [
            str(self._binary),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--secure-port={self._port}",
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"),
            f"--cert-dir={self._directory / 'certificates'}",
            f"--token-auth-file={self._directory / 'tokens.csv'}",
            *("--authorization-mode=RBAC", "--service-account-issuer=https://cluster.test"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *("--service-cluster-ip-range=10.0.0.0/24", "--disable-admission-plugins=ServiceAccount"),
            "--endpoint-reconciler-type=none",
        ]
        self._server = self._spawn("kube-apiserver", command)
        wait_until(self._is_ready, 120)

    def stop(self) -> None:
        """Kill the server: its clients find nobody listening."""
        if self._server:
            self._server.send_signal(signal.SIGKILL)
            self._server.wait()
            self._server = None

    def end(self) -> None:
        """End the server and etcd."""
        self.stop()
        self._etcd.kill()
        self._etcd.wait()

    def _is_ready(self) -> bool:
        assert self._server
        log = self._directory / "kube-apiserver.log"
        assert self._server.poll() is None, log.read_text()[-2000:]
        url = f"https://127.0.0.1:{self._port}/readyz"
        command = ["curl", "-sk", "-m", "5", "-H", "Authorization: Bearer administrator", url]
        return subprocess.run(command, capture_output=True, check=False).stdout == b"ok"

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "2"})
