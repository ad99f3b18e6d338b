"""The client of one endpoint: it chooses an instance, in turn, at random or by its id, and calls it over
HTTP.

A call is a POST with a JSON body, answered by a line of JSON per item.
"""

from __future__ import annotations

import asyncio
import json
import random
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from dynaplan.http.client import JSON_BODY, Answer, HttpClient
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import DeadlineExceeded, PermanentError, RequestRefused, TemporaryError, UserError
from dynaplan.worker.deadlines import deadline_after, iterate_until, timeout_headers
from dynaplan.worker.endpoints import to_plain
from dynaplan.worker.timing import (
    FIND_INSTANCE_S,
    FIND_RETRY_MAX_S,
    FIND_RETRY_MIN_S,
)

Items = AsyncGenerator[Any, None]


class EndpointClient:
    """Calls an endpoint: ``async for item in client.round_robin(request)``.

    A call whose instance cannot be reached, is draining, or dies before the first item goes to the next one.
    Its errors say whose fault it is and whether a retry helps:

    ================  ==========================================================================
    TemporaryError    no instance took the request within ``find_instance_s``, or the one that
                      answered was lost after its first item: a retry may help
    DeadlineExceeded  (one of those) the answer was not complete ``timeout_s`` after the call
    RequestRefused    the request does not fit the endpoint: the caller's fault
    PermanentError    the endpoint itself failed: its author's fault
    ================  ==========================================================================

    ``timeout_s`` travels with the request: the endpoint is cancelled at that time, too, and a call that it
    makes meanwhile ends with it. Leaving the loop early (``aclose``) cancels the endpoint at once.
    """

    def __init__(
        self,
        component: str,
        endpoint: str,
        discovery: Discovery,
        http: HttpClient,
        find_instance_s: float = FIND_INSTANCE_S,
    ) -> None:
        self._component = component
        self._endpoint = endpoint
        self._discovery = discovery
        self._http = http
        self._find_instance_s = find_instance_s
        self._last = -1

    def round_robin(self, request: Any = None, *, timeout_s: float | None = None) -> Items:
        """Call the instances in turn: yield what the next one answers with."""
        return self._call(self._next_round, request, timeout_s)

    def random(self, request: Any = None, *, timeout_s: float | None = None) -> Items:
        """Call an instance that is drawn at random, each as likely as the others."""
        return self._call(self._random_order, request, timeout_s)

    def direct(self, request: Any, instance_id: int, *, timeout_s: float | None = None) -> Items:
        """Call that instance, and no other one; PermanentError when there is none with the id."""
        return self._call(lambda: (self._instance(instance_id),), request, timeout_s, is_direct=True)

    def instance_ids(self) -> tuple[int, ...]:
        """Return the ids of the instances that are registered now, in ascending order."""
        return tuple(each.instance_id for each in self._instances())

    async def wait_for_instances(self, count: int = 1, *, timeout_s: float | None = None) -> tuple[int, ...]:
        """Wait until that many instances are registered; return their ids.

        Raises TemporaryError when there are fewer after ``timeout_s`` seconds.
        """
        changed = asyncio.Event()
        stop = self._discovery.on_change(changed.set)
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._instances()) < count:
                    await changed.wait()
                    changed.clear()
        except TimeoutError as error:
            there = len(self._instances())
            raise TemporaryError(
                f"{there} of {count} instances of {self._name} are there after {timeout_s:g} s"
            ) from error
        finally:
            stop()
        return self.instance_ids()

    @property
    def _name(self) -> str:
        return f"{self._component}.{self._endpoint}"

    def _instances(self) -> tuple[Instance, ...]:
        return self._discovery.instances(self._component, self._endpoint)

    def _next_round(self) -> Iterable[Instance]:
        by_id = {each.instance_id: each for each in self._instances()}
        order = rotate(tuple(by_id), self._last)
        if order:
            self._last = order[0]
        return [by_id[each] for each in order]

    def _random_order(self) -> Iterable[Instance]:
        instances = self._instances()
        return random.sample(instances, len(instances))

    def _instance(self, instance_id: int) -> Instance:
        for each in self._instances():
            if each.instance_id == instance_id:
                return each
        known = ", ".join(map(str, self.instance_ids())) or "none"
        raise PermanentError(f"{self._name} has no instance {instance_id}", hint=f"Registered: {known}.")

    async def _call(
        self,
        choose: Callable[[], Iterable[Instance]],
        request: Any,
        timeout_s: float | None,
        *,
        is_direct: bool = False,
    ) -> Items:
        deadline_s = deadline_after(timeout_s)
        items = self._call_any(choose, _body(request), deadline_s, is_direct)
        async with aclosing(iterate_until(deadline_s, items, self._name)) as timely:
            async for item in timely:
                yield item

    async def _call_any(
        self, choose: Callable[[], Iterable[Instance]], body: bytes, deadline_s: float, is_direct: bool
    ) -> Items:
        """Yield the answer of the first instance that takes the request."""
        give_up_s = asyncio.get_running_loop().time() + (0 if is_direct else self._find_instance_s)
        backoff = Backoff(FIND_RETRY_MIN_S, FIND_RETRY_MAX_S)
        reason = "no instance is registered"
        while True:
            for instance in choose():
                is_answering = False
                try:
                    async with aclosing(post_request(self._http, instance, body, deadline_s)) as items:
                        async for item in items:
                            is_answering = True
                            yield item
                    return
                except NotAccepted as error:
                    reason = f"{instance.worker or instance.url}: {error}"
                    if is_answering:
                        raise TemporaryError(f"{self._name} broke off: {reason}") from error
            if asyncio.get_running_loop().time() >= give_up_s:
                raise self._not_found(reason, is_direct)
            await backoff.pause()

    def _not_found(self, reason: str, is_direct: bool) -> TemporaryError:
        hint = "Take another instance." if is_direct else ""
        return TemporaryError(
            f"no instance of {self._component} answers {self._endpoint}: {reason}", hint=hint
        )


def _body(request: Any) -> bytes:
    try:
        return json.dumps(to_plain(request)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"the request cannot be sent as JSON: {error}",
            hint="Send plain data, a dataclass or a pydantic model.",
        ) from error


def rotate(instance_ids: Sequence[int], last: int) -> tuple[int, ...]:
    """Return the ids in the order of a round: the first above ``last``, then upwards, then from the lowest.

    The caller passes the first id of one round as ``last`` of the next, so that every instance that stays has
    its turn in each round, whichever others come and go.
    """
    ring = sorted(instance_ids)
    begin = bisect_right(ring, last)
    return (*ring[begin:], *ring[:begin])


class NotAccepted(Exception):
    """An instance refused the request, or died before its first item: another one may take it."""


async def post_request(
    http: HttpClient, instance: Instance, body: bytes, deadline_s: float
) -> AsyncGenerator[Any, None]:
    """Yield the items that the instance answers with.

    Raises NotAccepted when it cannot be reached, refuses, or is lost; RequestRefused when the request is at
    fault; DeadlineExceeded when the endpoint has noticed that the time is over; PermanentError when the
    endpoint failed.
    """
    what = f"{instance.component}.{instance.endpoint}"
    try:
        url, headers = f"{instance.url}/{instance.endpoint}", JSON_BODY | timeout_headers(deadline_s)
        with await http.send("POST", url, body, headers) as answer:
            if answer.status != 200:
                raise _refusal(what, answer.status, await _error_text(answer))
            async for line in answer.lines():
                yield _item(line, what)
    except OSError as error:
        raise NotAccepted(f"{type(error).__name__}: {error}") from error


def _refusal(what: str, status: int, text: str) -> Exception:
    """Return the error that says whose fault a status is, and whether a retry helps."""
    match status:
        case 503:
            return NotAccepted(text)
        case 504:
            return DeadlineExceeded(f"{what}: {text}")
        case 400 | 413:
            return RequestRefused(f"{what}: {text}", status=status)
        case 401:
            hint = "Its process and this one have different tokens: they belong to different deployments."
            return PermanentError(f"{what}: {text}", hint=hint)
    return PermanentError(f"{what}: {text}")


def _item(line: bytes, what: str) -> Any:
    item = json.loads(line)
    if isinstance(item, dict) and item.keys() == {"error", "error_type"}:
        if item["error_type"] == DeadlineExceeded.__name__:
            raise DeadlineExceeded(str(item["error"]))
        raise PermanentError(f"{what}: {item['error_type']}: {item['error']}")
    return item


async def _error_text(answer: Answer) -> str:
    text = (await answer.read()).decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}: {text[:200]}"
