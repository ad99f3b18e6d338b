"""A port that its owner has chosen is one model's, and is given to nobody else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dynaplan.process import port_leases
from dynaplan.process.port_leases import lease_port, lease_ports
from dynaplan.util.errors import DeploymentError
from dynaplan.util.sockets import free_port


def test_a_chosen_port_is_leased_once_and_not_while_somebody_listens_on_it(tmp_path: Path) -> None:
    port = free_port()
    with lease_port(port, tmp_path) as lease:
        assert lease.ports == (port,)
        with pytest.raises(DeploymentError, match=f"port {port} is in use"):
            lease_port(port, tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        with pytest.raises(DeploymentError, match=f"port {port} is in use"):
            lease_port(port, tmp_path)


def test_ports_that_owners_have_chosen_are_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setattr(port_leases, "quiet_ports", lambda: (first, first + 2))
    monkeypatch.setattr(port_leases, "is_free", lambda port: True)
    with lease_ports(1, tmp_path, avoided={first, first + 2}) as lease:
        assert lease.ports == (first + 1,)
    with pytest.raises(DeploymentError, match="no 2 free loopback ports"):
        lease_ports(2, tmp_path, avoided={first + 1})
