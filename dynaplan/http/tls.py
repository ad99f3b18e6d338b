"""TLS by PEM files: of servers, of clients, and the faults of the files."""

from __future__ import annotations

import logging
import os
import ssl
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from dynaplan.util.sockets import is_own_address


class UnusableTls(ValueError):
    """Files that no TLS can be made of; the message is for the user."""


def check_readable(path: str, mark: str) -> None:
    """Raise UnusableTls unless the file can be read and contains ``mark``, the end of a PEM head line."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise UnusableTls(f"{path}: {error.strerror}") from error
    if mark not in text:
        what = "private key" if "KEY" in mark else "certificate"
        raise UnusableTls(f"{path} holds no {what} in PEM form")


def describe_error(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason as people write it."""
    message = getattr(error, "verify_message", "") or (error.reason or "").replace("_", " ").lower()
    return str(message or error)


ClientTls = ssl.SSLContext | bool
"""A client's check of servers: a context; True is the system's authorities, False nothing at all."""


def client_tls(authority: str) -> ClientTls:
    """Return what verifies servers by that PEM file, or by the system's authorities when it is empty.

    Raises UnusableTls when the file cannot be used.
    """
    if not authority:
        return True
    check_readable(authority, "CERTIFICATE-----")
    try:
        return ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise UnusableTls(f"{authority}: {describe_error(error)}") from error


def trusted(url: str, verified: ClientTls) -> ClientTls:
    """Return what to check the server of a URL by: ``verified``, but nothing for an address of this host.

    Nobody can listen in between there, and the certificate may hold only the name that other hosts use.
    """
    host = urlsplit(url).hostname or ""
    try:
        is_here = host == "localhost" or ip_address(host).is_loopback or is_own_address(host)
    except ValueError:
        is_here = False
    return False if is_here else verified


@cache
def unverified() -> ssl.SSLContext:
    """Return a client's context that believes any certificate: for addresses of this host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


log = logging.getLogger(__name__)

MAX_STEPS = 10
"""Turns that a handshake in memory may take; TLS 1.2 takes most, three."""


class ServerTls:
    """A server's certificate and key. Files that are renewed are used for the next connections.

    Raises UnusableTls when they cannot be used. Renewed ones that cannot be used are logged once, and the old
    ones stay.
    """

    def __init__(self, certificate: str, key: str) -> None:
        self._certificate, self._key = certificate, key
        self._seen: tuple[int, ...] = ()
        self._context = _server_context(certificate, key)
        self._seen = self._state()

    @property
    def context(self) -> ssl.SSLContext:
        now = self._state()
        if now != self._seen:
            self._seen = now
            try:
                self._context = _server_context(self._certificate, self._key)
                log.info("%s has been renewed", self._certificate)
            except UnusableTls as error:
                log.error("%s; the old certificate stays in use", error)
        return self._context

    def fault(self, name: str = "", authority: str = "") -> str:
        """Return what a client would find wrong with the certificate, in OpenSSL's words; empty for nothing.

        It must be valid now, hold the host name or address ``name`` unless that is empty, and be vouched for
        by the PEM file ``authority`` unless that is empty.
        """
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = bool(name)
        client.load_verify_locations(authority or self._certificate)
        if not authority:
            client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return _fault_of_handshake(self._context, client, name)

    def _state(self) -> tuple[int, ...]:
        try:
            return tuple(os.stat(path).st_mtime_ns for path in (self._certificate, self._key))
        except OSError:  # in the middle of being renewed
            return self._seen


def _server_context(certificate: str, key: str) -> ssl.SSLContext:
    check_readable(certificate, "CERTIFICATE-----")
    check_readable(key, "PRIVATE KEY-----")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])

    def refuse() -> str:
        raise UnusableTls(f"{key} asks for a pass phrase, and nobody is there to type it")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UnusableTls(f"the key {key} does not belong to the certificate {certificate}") from error
        raise UnusableTls(f"{certificate} with {key}: {describe_error(error)}") from error
    return context


def _fault_of_handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=name or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(MAX_STEPS):
        is_done = True
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                is_done = False
            except ssl.SSLError as error:
                return describe_error(error)
        if is_done:
            return ""
    return "no handshake comes about"
