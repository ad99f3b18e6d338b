"""The TLS of a client: what it verifies servers by."""

from __future__ import annotations

import ssl
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from dynaplan.util.sockets import is_own_address
from dynaplan.util.tls.files import UnusableTls, check_readable, said_of

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
        raise UnusableTls(f"{authority}: {said_of(error)}") from error


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
