"""Bound sockets and free ports."""

from __future__ import annotations

import socket

import pytest

from dynaplan.foundation.sockets import (
    LOWEST_PORT,
    bound_socket,
    free_port,
    holding_socket,
    is_free,
    quiet_ports,
)


def test_a_port_that_somebody_listens_on_can_be_had_only_if_all_share_it() -> None:
    with bound_socket("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        first.listen()
        bound_socket("127.0.0.1", first.getsockname()[1])
    with bound_socket("127.0.0.1", 0, is_shared=True) as first:
        first.listen()
        bound_socket("127.0.0.1", first.getsockname()[1], is_shared=True).close()


def test_a_held_port_can_be_shared_afterwards_but_not_taken() -> None:
    with holding_socket("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        bound_socket("127.0.0.1", port, is_shared=True).close()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", port)


def test_a_port_that_others_share_is_not_joined_by_holding_it() -> None:
    with bound_socket("127.0.0.1", 0, is_shared=True) as other, pytest.raises(OSError, match="in use"):
        other.listen()
        holding_socket("127.0.0.1", other.getsockname()[1])


def test_an_unknown_host_is_told_from_a_taken_port() -> None:
    with pytest.raises(socket.gaierror):
        bound_socket("no-such-host.invalid", 0)


def test_a_free_port_lies_in_the_range_from_which_the_kernel_takes_none() -> None:
    lowest, highest = quiet_ports()
    port = free_port()
    assert LOWEST_PORT <= lowest <= port <= highest
    with bound_socket("127.0.0.1", port):
        assert not is_free(port)


def test_a_machine_without_free_ports_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaplan.foundation.sockets.is_free", lambda port: False)
    with pytest.raises(OSError, match="no free loopback port"):
        free_port()
