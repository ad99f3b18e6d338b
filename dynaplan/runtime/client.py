"""Clients of dependencies: a service holds one for each, and calls another service's endpoints by it."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp

from dynaplan.domain.errors import PermanentError, TemporaryError
from dynaplan.domain.wire.discovery import Instance
from dynaplan.foundation.backoff import Backoff
from dynaplan.runtime.discovery import Discovery
from dynaplan.runtime.endpoints import ServedEndpoint, items_of, plain

log = logging.getLogger(__name__)

FIND_INSTANCE_S = 10.0
"""Longest time for which a call looks for an instance that takes it."""

CONNECT_S = 2.0
IDLE_CONNECTION_S = 30.0
"""Shorter than the server keeps its side open, so that an idle connection is seldom found dead."""

RETRY_FIRST_S = 0.02
RETRY_LONGEST_S = 0.5

Call = Callable[..., AsyncGenerator[Any, None]]


class NotTaken(Exception):
    """An instance did not take the request, or died before its first item: another one may have it."""


class DependencyClient:
    """``client.<endpoint>(request)`` yields the items that an instance of the service answers with.

    Made once per dependency. Instances are taken in turn. A call whose instance cannot be reached, is
    draining, or dies before the first item goes to the next one; when none has taken it within
    ``find_instance_s`` the call raises TemporaryError. An instance that dies after its first item is
    a TemporaryError as well, and an error of the endpoint itself a PermanentError: neither is tried again.
    """

    def __init__(
        self,
        service: str,
        endpoints: Iterable[str],
        discovery: Discovery,
        session: aiohttp.ClientSession,
        find_instance_s: float = FIND_INSTANCE_S,
    ) -> None:
        self._service = service
        self._endpoints = tuple(endpoints)
        self._discovery = discovery
        self._session = session
        self._find_instance_s = find_instance_s
        self._turn = itertools.count()

    def __getattr__(self, name: str) -> Call:
        if name.startswith("__") or name not in self._endpoints:
            raise _unknown_endpoint(name, self._service, self._endpoints)

        def call(request: Any = None) -> AsyncGenerator[Any, None]:
            return self._call(name, request)

        return call

    async def _call(self, endpoint: str, request: Any) -> AsyncGenerator[Any, None]:
        body = json.dumps(plain(request)).encode()
        deadline_s = time.monotonic() + self._find_instance_s
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        reason = "no instance is registered"
        while True:
            for instance in self._in_turn(endpoint):
                is_answering = False
                try:
                    async with aclosing(_items(self._session, instance, endpoint, body)) as items:
                        async for item in items:
                            is_answering = True
                            yield item
                    return
                except NotTaken as error:
                    reason = f"{instance.worker or instance.url}: {error}"
                    if is_answering:
                        raise TemporaryError(f"{self._service}.{endpoint} broke off: {reason}") from error
            if time.monotonic() >= deadline_s:
                raise TemporaryError(f"no instance of {self._service} answers {endpoint}: {reason}")
            await backoff.pause()

    def _in_turn(self, endpoint: str) -> tuple[Instance, ...]:
        """Return the instances, beginning with the one whose turn it is."""
        instances = self._discovery.instances(self._service, endpoint)
        if not instances:
            return ()
        first = next(self._turn) % len(instances)
        return instances[first:] + instances[:first]


class LocalClient:
    """The same calls for a dependency that lives in this process: no network, plain method calls."""

    def __init__(self, service: str, endpoints: Mapping[str, ServedEndpoint]) -> None:
        self._service = service
        self._endpoints = endpoints

    def __getattr__(self, name: str) -> Call:
        if name.startswith("__") or name not in self._endpoints:
            raise _unknown_endpoint(name, self._service, self._endpoints)

        def call(request: Any = None) -> AsyncGenerator[Any, None]:
            return items_of(self._endpoints[name], plain(request))

        return call


def worker_session(token: str) -> aiohttp.ClientSession:
    """Make a session for calls between workers: it bears their token and has no limits."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )


async def _items(
    session: aiohttp.ClientSession, instance: Instance, endpoint: str, body: bytes
) -> AsyncGenerator[Any, None]:
    try:
        async with session.post(
            f"{instance.url}/{endpoint}", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status == 503:
                raise NotTaken(await _error_text(response))
            if response.status != 200:
                raise PermanentError(f"{instance.component}.{endpoint}: {await _error_text(response)}")
            async for line in _lines(response.content):
                yield _item(line, f"{instance.component}.{endpoint}")
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise NotTaken(f"{type(error).__name__}: {error}") from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines, of any length."""
    rest: list[bytes] = []
    async for chunk in content.iter_any():
        *complete, last = chunk.split(b"\n")
        for line in complete:
            yield b"".join((*rest, line))
            rest.clear()
        rest.append(last)


def _item(line: bytes, what: str) -> Any:
    item = json.loads(line)
    if isinstance(item, dict) and item.keys() == {"error", "error_type"}:
        raise PermanentError(f"{what}: {item['error_type']}: {item['error']}")
    return item


async def _error_text(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status}: {text[:200]}"


def _unknown_endpoint(name: str, service: str, endpoints: Iterable[str]) -> AttributeError:
    return AttributeError(
        f"No Dynamo endpoint '{name}' found on service '{service}'. Available endpoints: {list(endpoints)}"
    )
