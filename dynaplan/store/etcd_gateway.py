"""Calls to etcd's JSON gateway: HTTP, fail-over between endpoints, authentication, errors.

etcd answers every call of its gRPC interface as JSON under ``/v3/...`` on its client address, also on a unix
socket. Keys and values travel in base64, 64-bit numbers as decimal text.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from dynaplan.store.model import KeyValue
from dynaplan.store.timing import ETCD_CALL_TIMEOUT_S, ETCD_CONNECT_TIMEOUT_S
from dynaplan.util.errors import ConfigError, PermanentError, StoreUnavailable

Document = dict[str, Any]

DEFAULT_ENDPOINT = "http://localhost:2379"
# gRPC status codes for which another try is useless: invalid argument, not found, already exists,
# permission denied, failed precondition, out of range, unimplemented, unauthenticated.
PERMANENT_CODES = frozenset({3, 5, 6, 7, 9, 11, 12, 16})
NOT_FOUND = 5
UNAUTHENTICATED = 16
INVALID = 3
STALE_TOKEN = "revision of auth store is old"
"""etcd's message, with the code "invalid argument", for a token from before a change of its users or
roles."""

COMMON_NAME_REFUSED = b"CommonName of client"
"""The beginning of etcd's answer to a client certificate that its gateway does not take beside a password."""

FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError)


class EtcdRefusal(PermanentError):
    """etcd answered with an error that a retry does not change; ``code`` is the gRPC status code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_signed_out(self) -> bool:
        """True when signing in again may help."""
        is_old = self.code == INVALID and STALE_TOKEN in str(self)
        return is_old or self.code == UNAUTHENTICATED


class EtcdGateway:
    """The client side of the gateway: one HTTP session per endpoint, tried in turn.

    A call that an endpoint certainly did not receive is retried at the next one at once; any other failure
    raises StoreUnavailable, and the next call starts at the next endpoint.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        *,
        credentials: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not endpoints:
            raise ConfigError(
                "no etcd endpoint is given",
                hint=f"Set ETCD_ENDPOINTS={DEFAULT_ENDPOINT}, or another address.",
            )
        self._endpoints = tuple(_normalize_endpoint(endpoint) for endpoint in endpoints)
        self._credentials = credentials
        self._tls = tls
        self._current = 0
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._token = ""
        self._streams: set[aiohttp.ClientResponse] = set()
        self.closed = asyncio.Event()

    async def call(self, path: str, body: Document) -> Document:
        """The first document of the answer; raises StoreUnavailable within the time limit, or EtcdRefusal."""
        try:
            async with asyncio.timeout(ETCD_CALL_TIMEOUT_S), await self._open(path, body) as response:
                return _first_document(await response.read())
        except FAILURES as error:
            raise self._unavailable(path, error) from error

    @asynccontextmanager
    async def stream(
        self, path: str, body: Document, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[Document]]:
        """The documents of an endless answer. They end when none has arrived for ``silence_s``.

        Raises StoreUnavailable when the connection is lost, or the first document does not come in time.
        """
        try:
            async with asyncio.timeout(ETCD_CALL_TIMEOUT_S):
                response = await self._open(path, body)
            self._streams.add(response)
            try:
                _enable_keepalive(response)
                yield _documents(response, ETCD_CALL_TIMEOUT_S, silence_s)
            finally:
                self._streams.discard(response)
                _abort(response)
        except FAILURES as error:
            raise self._unavailable(path, error) from error

    async def close(self) -> None:
        """Close every connection; calls under way fail, streams end."""
        self.closed.set()
        for response in self._streams:
            # Closing its connection would not wake up who reads it.
            response.content.set_exception(aiohttp.ClientConnectionError("the client is closed"))
        for session in self._sessions.values():
            await session.close()
        await asyncio.sleep(0)  # the socket of a stream that has just ended is closed in the loop's next turn

    async def _open(self, path: str, body: Document) -> aiohttp.ClientResponse:
        """An answer with status 200, after signing in (again) where that is needed; to be closed."""
        for last_try in (False, True):
            if self._credentials and not self._token:
                await self._sign_in()
            response = await self._post(path, body)
            if response.status == 200:
                return response
            async with response:
                error = _parse_error(await response.read())
            is_signed_out = isinstance(error, EtcdRefusal) and error.is_signed_out
            if last_try or not (self._credentials and is_signed_out):
                raise error
            self._token = ""
        raise AssertionError("unreachable")

    async def _post(self, path: str, body: Document) -> aiohttp.ClientResponse:
        headers = {"Authorization": self._token} if self._token else {}
        for attempt in range(len(self._endpoints)):
            endpoint = self._endpoints[self._current]
            try:
                return await self._session(endpoint).post(path, json=body, headers=headers)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._current = (self._current + 1) % len(self._endpoints)
                if attempt + 1 == len(self._endpoints):
                    raise
        raise AssertionError("unreachable")

    async def _sign_in(self) -> None:
        name, password = self._credentials or ("", "")
        response = await self._post("/v3/auth/authenticate", {"name": name, "password": password})
        async with response:
            if response.status != 200:
                raise _parse_error(await response.read())
            self._token = str(_first_document(await response.read())["token"])

    def _session(self, endpoint: str) -> aiohttp.ClientSession:
        session = self._sessions.get(endpoint)
        if session is None and not self.closed.is_set():
            if endpoint.startswith("unix://"):
                path = endpoint.removeprefix("unix://")
                connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path, limit=0)
                base = "http://localhost"
            else:
                connector = aiohttp.TCPConnector(ssl=self._tls or True, limit=0)
                base = endpoint
            timeout = aiohttp.ClientTimeout(total=None, connect=ETCD_CONNECT_TIMEOUT_S)
            session = aiohttp.ClientSession(base, connector=connector, timeout=timeout)
            self._sessions[endpoint] = session
        if session is None or session.closed:
            raise aiohttp.ClientConnectionError("the client is closed")
        return session

    def _unavailable(self, path: str, error: BaseException) -> StoreUnavailable:
        endpoint = self._endpoints[self._current]
        self._current = (self._current + 1) % len(self._endpoints)
        return StoreUnavailable(f"etcd at {endpoint} did not answer {path}: {_reason(error)}")


def parse_endpoints(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The addresses in ``ETCD_ENDPOINTS``, comma-separated; etcd's usual one when it is not set."""
    text = environ.get("ETCD_ENDPOINTS") or DEFAULT_ENDPOINT
    return tuple(part.strip() for part in text.split(",") if part.strip())


def tls_context(environ: Mapping[str, str]) -> ssl.SSLContext | None:
    """TLS with the PEM files ``ETCD_AUTH_CA``, ``ETCD_AUTH_CLIENT_CERT``, ``ETCD_AUTH_CLIENT_KEY``, if
    set."""
    authority, certificate = environ.get("ETCD_AUTH_CA"), environ.get("ETCD_AUTH_CLIENT_CERT")
    if not (authority or certificate):
        return None
    key = environ.get("ETCD_AUTH_CLIENT_KEY")
    where = f"ETCD_AUTH_CA={authority}"
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate:
            where = f"ETCD_AUTH_CLIENT_CERT={certificate}, ETCD_AUTH_CLIENT_KEY={key or ''}"
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the TLS files for etcd cannot be used: {where}: {error.strerror or error}",
            hint="Expected readable PEM files; certificate and key belong together.",
        ) from error
    return context


def _reason(error: BaseException) -> str:
    """Return why there is no answer; of TLS, with the variable that may be wrong."""
    cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"ETCD_AUTH_CA does not vouch for its certificate ({cause.verify_message})"
    if isinstance(cause, ssl.SSLError) and "CERTIFICATE" in (cause.reason or ""):
        return f"it does not take ETCD_AUTH_CLIENT_CERT, or asks for one that is not given ({cause.reason})"
    return str(error) or type(error).__name__


def _normalize_endpoint(endpoint: str) -> str:
    if endpoint.startswith("unix:///"):
        return endpoint
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"not an etcd endpoint: {endpoint!r}",
            hint="ETCD_ENDPOINTS holds http://host:port, https://host:port or unix:///path, comma-separated.",
        )
    return endpoint.rstrip("/")


async def _documents(
    response: aiohttp.ClientResponse, first_s: float, silence_s: float
) -> AsyncGenerator[Document]:
    """Yield one document per line; ends when none has arrived for ``silence_s``.

    Raises TimeoutError when the first does not come within ``first_s``, ServerDisconnectedError at the end.
    """
    pending = b""
    has_begun = False
    while True:
        try:
            async with asyncio.timeout(silence_s if has_begun else first_s):
                chunk = await response.content.readany()
        except TimeoutError:
            if has_begun:
                return
            raise
        if not chunk:
            raise aiohttp.ServerDisconnectedError("the stream ended")
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield _unwrap(json.loads(line))
            has_begun = True


def _abort(response: aiohttp.ClientResponse) -> None:
    """Abort the response and its connection.

    Closed, a TLS connection would wait up to 30 s for the server to close it too. Nothing would wait for it:
    not the session that had it, nor the loop at its end.
    """
    transport = response.connection.transport if response.connection else None
    if transport:
        transport.abort()
    response.close()


def _enable_keepalive(response: aiohttp.ClientResponse) -> None:
    """Let the kernel find out within 11 s that the other machine is gone: a quiet watch sends nothing."""
    transport = response.connection.transport if response.connection else None
    peer: socket.socket | None = transport.get_extra_info("socket") if transport else None
    if peer is None or peer.family == socket.AF_UNIX:
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _first_document(body: bytes) -> Document:
    return _unwrap(json.loads(body.split(b"\n", 1)[0]))


def _unwrap(document: Document) -> Document:
    """Return the message itself, which a streamed answer wraps in ``result`` (or ``error``)."""
    if "error" in document:
        raise _to_error(document["error"] if isinstance(document["error"], dict) else document)
    result: Document = document.get("result", document)
    return result


def _parse_error(body: bytes) -> EtcdRefusal | StoreUnavailable:
    if body.startswith(COMMON_NAME_REFUSED):
        return EtcdRefusal(
            "beside user and password it takes only client certificates without a CommonName", INVALID
        )
    try:
        return _to_error(json.loads(body))
    except (ValueError, AttributeError):
        return StoreUnavailable(f"etcd answered {body[:200]!r}")


def _to_error(document: Document) -> EtcdRefusal | StoreUnavailable:
    code = int(document.get("code") or document.get("grpc_code") or 0)
    message = str(document.get("message") or document.get("error") or document)
    return EtcdRefusal(message, code) if code in PERMANENT_CODES else StoreUnavailable(message)


def encode(text: str) -> str:
    """Base64 of the text's UTF-8; bytes that are not UTF-8 stand in the text by ``surrogateescape``."""
    return base64.b64encode(text.encode(errors="surrogateescape")).decode()


def decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="surrogateescape")


def key_range(prefix: str) -> Document:
    """The range of all keys with that prefix; the empty prefix means every key."""
    if not prefix:
        return {"key": base64.b64encode(b"\0").decode(), "range_end": base64.b64encode(b"\0").decode()}
    start = prefix.encode(errors="surrogateescape")
    # No key that is UTF-8 has the byte 0xff; behind bytes that are not UTF-8, adding one would carry.
    stem = start.rstrip(b"\xff")
    end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
    return {"key": encode(prefix), "range_end": base64.b64encode(end).decode()}


def key_value(document: Document) -> KeyValue:
    """One key as etcd describes it; fields that are zero are left out there."""
    return KeyValue(
        key=decode(document["key"]),
        value=decode(document.get("value", "")),
        revision=int(document.get("mod_revision", 0)),
        lease=int(document.get("lease", 0)),
    )


def key_values(answer: Document) -> tuple[KeyValue, ...]:
    return tuple(key_value(document) for document in answer.get("kvs", ()))
