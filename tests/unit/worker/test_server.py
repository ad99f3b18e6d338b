"""Which addresses a component may have for other hosts."""

from __future__ import annotations

import pytest

from dynaplan.util.errors import ConfigError
from dynaplan.worker import server


@pytest.mark.parametrize("host", [None, "", "127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_token(host: str | None) -> None:
    assert server.bind_advertised(host, has_token=False) is None


def test_beyond_loopback_the_token_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"the namespace's token must be named\n.*--token-file"):
        server.bind_advertised("10.0.0.2", has_token=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_an_address_that_nobody_can_call_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="nobody can call that"):
        server.bind_advertised(host, has_token=True)


@pytest.mark.parametrize("host", ["192.0.2.250", "no.such.host.invalid", "10.0.0..5", "a" * 64])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="Expected a name or an address of this machine"):
        server.bind_advertised(host, has_token=True)


def test_the_name_is_kept_and_its_address_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    address = (2, 1, 6, "", ("127.0.0.1", 0))
    monkeypatch.setattr(server.socket, "getaddrinfo", lambda *_, **__: [address])
    found = server.bind_advertised("gpu1.example", has_token=True)
    assert found
    with found.socket:
        assert (found.host, found.socket.getsockname()[0]) == ("gpu1.example", "127.0.0.1")


def test_a_port_that_is_asked_for_is_bound_and_one_that_is_taken_is_named(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    address = (2, 1, 6, "", ("127.0.0.1", unused_tcp_port))
    monkeypatch.setattr(server.socket, "getaddrinfo", lambda *_, **__: [address])
    found = server.bind_advertised("gpu1.example", has_token=True, port=unused_tcp_port)
    assert found
    with found.socket:
        found.socket.listen()
        assert found.socket.getsockname()[1] == unused_tcp_port
        with pytest.raises(ConfigError, match=rf"gpu1.example, port {unused_tcp_port}: .*\n.*a free port"):
            server.bind_advertised("gpu1.example", has_token=True, port=unused_tcp_port)
