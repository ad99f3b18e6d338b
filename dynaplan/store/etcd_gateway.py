"""Calls to etcd's JSON gateway: HTTP, fail-over between endpoints, authentication, errors.

etcd answers every call of its gRPC interface as JSON under ``/v3/...`` on its client address, also on a unix
socket. Keys and values travel in base64, 64-bit numbers as decimal text.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from dynaplan.http.client import JSON_BODY, Answer, HttpClient, NotConnected
from dynaplan.http.connections import KeepAlive
from dynaplan.store.model import KeyValue
from dynaplan.store.timing import ETCD_CALL_TIMEOUT_S, ETCD_CONNECT_TIMEOUT_S
from dynaplan.util.errors import ConfigError, PermanentError, StoreUnavailable

Document = dict[str, Any]

DEFAULT_ENDPOINT = "http://localhost:2379"
UNIX = "unix://"
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

HEADERS = {**JSON_BODY, "Accept": "*/*"}
"""By ``Accept`` etcd knows calls of its gateway: without it the gateway's own certificate would say who
calls, and lend its rights to those who have not signed in."""

KEEPALIVE = KeepAlive(idle_s=5, interval_s=2, probes=3)
"""A quiet watch sends nothing: so the kernel finds out within 11 s that the other machine is gone."""

FAILURES = (OSError, ValueError)


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
    """A client of etcd's JSON gateway: one HTTP client per endpoint, tried in turn.

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
        self._clients: dict[str, HttpClient] = {}
        self._token = ""
        self.closed = asyncio.Event()

    async def call(self, path: str, body: Document) -> Document:
        """The first document of the answer; raises StoreUnavailable within the time limit, or EtcdRefusal."""
        try:
            async with asyncio.timeout(ETCD_CALL_TIMEOUT_S):
                with await self._open(path, body) as answer:
                    return _first_document(await answer.read())
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
                answer = await self._open(path, body)
            try:
                answer.connection.have_kernel_probe(KEEPALIVE)
                yield _documents(answer, ETCD_CALL_TIMEOUT_S, silence_s)
            finally:
                answer.connection.abort()
                answer.close()
        except FAILURES as error:
            raise self._unavailable(path, error) from error

    async def close(self) -> None:
        """Close every connection; calls under way fail, streams end."""
        self.closed.set()
        for client in self._clients.values():
            await client.close()

    async def _open(self, path: str, body: Document) -> Answer:
        """An answer with status 200, after signing in (again) where that is needed; to be closed."""
        for last_try in (False, True):
            if self._credentials and not self._token:
                await self._sign_in()
            answer = await self._post(path, body)
            if answer.status == 200:
                return answer
            with answer:
                error = _parse_error(await answer.read())
            is_signed_out = isinstance(error, EtcdRefusal) and error.is_signed_out
            if last_try or not (self._credentials and is_signed_out):
                raise error
            self._token = ""
        raise AssertionError("unreachable")

    async def _post(self, path: str, body: Document) -> Answer:
        headers = {**HEADERS, "Authorization": self._token} if self._token else HEADERS
        data = json.dumps(body).encode()
        for attempt in range(len(self._endpoints)):
            endpoint = self._endpoints[self._current]
            try:
                return await self._client(endpoint).send("POST", _base(endpoint) + path, data, headers)
            except NotConnected:
                self._current = (self._current + 1) % len(self._endpoints)
                if attempt + 1 == len(self._endpoints):
                    raise
        raise AssertionError("unreachable")

    async def _sign_in(self) -> None:
        name, password = self._credentials or ("", "")
        with await self._post("/v3/auth/authenticate", {"name": name, "password": password}) as answer:
            if answer.status != 200:
                raise _parse_error(await answer.read())
            self._token = str(_first_document(await answer.read())["token"])

    def _client(self, endpoint: str) -> HttpClient:
        if self.closed.is_set():
            raise ConnectionError("the client is closed")
        if endpoint not in self._clients:
            self._clients[endpoint] = HttpClient(
                tls=self._tls or True,
                unix_socket=endpoint.removeprefix(UNIX) if endpoint.startswith(UNIX) else "",
                connect_timeout_s=ETCD_CONNECT_TIMEOUT_S,
            )
        return self._clients[endpoint]

    def _unavailable(self, path: str, error: BaseException) -> StoreUnavailable:
        endpoint = self._endpoints[self._current]
        self._current = (self._current + 1) % len(self._endpoints)
        return StoreUnavailable(f"etcd at {endpoint} did not answer {path}: {_reason(error)}")


def _base(endpoint: str) -> str:
    return "http://localhost" if endpoint.startswith(UNIX) else endpoint


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


async def _documents(answer: Answer, first_s: float, silence_s: float) -> AsyncGenerator[Document]:
    """Yield one document per line; ends when none has arrived for ``silence_s``.

    Raises TimeoutError when the first does not come within ``first_s``, ConnectionError at the end.
    """
    pending = b""
    has_begun = False
    while True:
        try:
            async with asyncio.timeout(silence_s if has_begun else first_s):
                chunk = await answer.read_some()
        except TimeoutError:
            if has_begun:
                return
            raise
        if not chunk:
            raise ConnectionError("the stream ended")
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield _unwrap(json.loads(line))
            has_begun = True


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
