"""Bound sockets and free ports."""

from __future__ import annotations

import os
import socket

import pytest

from dynaplan.util.sockets import (
    MIN_PORT,
    bound_socket,
    free_port,
    holding_socket,
    is_free,
    is_own_address,
    listens_on_loopback,
    quiet_ports,
    socket_of_stdin,
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


def test_a_name_is_bound_at_its_ipv4_address_and_one_that_has_none_at_its_ipv6_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    for known, expected in (([six, four], "127.0.0.1"), ([six], "::1")):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, known=known, **__: known)
        with bound_socket("mine", 0) as bound:
            assert bound.getsockname()[0] == expected


@pytest.mark.parametrize(
    ("host", "resolves_to", "is_loopback"),
    [
        ("box", ["::1", "127.0.1.1"], True),
        ("six", ["::1"], True),
        ("wide", ["::1", "10.0.0.1"], False),
        ("", ["0.0.0.0"], False),
    ],
)
def test_a_name_listens_on_loopback_where_the_address_that_it_is_bound_at_is_one(
    host: str, resolves_to: list[str], is_loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0))
        for each in resolves_to
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listens_on_loopback.__wrapped__(host) is is_loopback


@pytest.mark.parametrize("host", ["no-such-host.invalid", "n" * 64])
def test_what_resolves_to_nothing_does_not_listen_on_loopback(host: str) -> None:
    assert not listens_on_loopback(host)


def test_a_free_port_lies_in_the_range_from_which_the_kernel_takes_none() -> None:
    lowest, highest = quiet_ports()
    port = free_port()
    assert MIN_PORT <= lowest <= port <= highest
    with bound_socket("127.0.0.1", port):
        assert not is_free(port)


def test_a_machine_without_free_ports_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaplan.util.sockets.is_free", lambda port: False)
    with pytest.raises(OSError, match="no free loopback port"):
        free_port()


def descriptor_of(source: socket.socket) -> int:
    """A descriptor that the function may take the place of, as it does with standard input."""
    return os.dup(source.fileno())


def test_a_socket_left_as_standard_input_is_taken_and_nobody_inherits_it() -> None:
    with bound_socket("127.0.0.1", 0) as parents:
        stdin = descriptor_of(parents)
        taken = socket_of_stdin(parents.getsockname()[1], stdin)
        assert taken
        with taken:
            assert taken.getsockname() == parents.getsockname()
            assert not taken.get_inheritable()
        assert os.readlink(f"/proc/self/fd/{stdin}") == "/dev/null"
        os.close(stdin)


def test_any_other_standard_input_is_left_alone() -> None:
    with bound_socket("127.0.0.1", 0) as other_port:
        port = other_port.getsockname()[1]
        other_port.listen()
        with (
            socket.create_connection(("127.0.0.1", port)) as connected,
            other_port.accept()[0] as accepted,
            socket.socket(socket.AF_UNIX) as local,
            open(os.devnull) as file,
        ):
            assert accepted.getsockname()[1] == port
            for source, wanted in ((other_port, 1), (connected, port), (accepted, port), (local, port)):
                stdin = descriptor_of(source)
                assert socket_of_stdin(wanted, stdin) is None
                assert os.readlink(f"/proc/self/fd/{stdin}").startswith("socket:")
                os.close(stdin)
            assert socket_of_stdin(port, file.fileno()) is None
    assert socket_of_stdin(port, 10**6) is None


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.0.0.7", True),
        ("192.0.2.77", False),
        ("224.0.0.1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_an_address_of_this_host_is_told_from_others(address: str, is_own: bool) -> None:
    assert is_own_address(address) is is_own
