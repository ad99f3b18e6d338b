"""Reserve a slot at a worker before the request is sent there.

Workers whose engine needs it say ``reserves`` on their card, the data of their registration: llama.cpp
loads a hand-off into one of a fixed number of slots, and the request must name that slot.
docs/decisions/0015.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from dynaplan.gateway import timing
from dynaplan.gateway.upstream import Upstream, WorkerDied, WorkerRefused
from dynaplan.store.instances import Instance
from dynaplan.util.documents import object_field, parse_object
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

RESERVE_PATH = "/kv_slots/reserve"
RELEASE_PATH = "/kv_slots/release"


class Reservations:
    """Reserves a worker's slot for a request and gives it back when the request has ended."""

    def __init__(self, upstream: Upstream, background: BackgroundTasks) -> None:
        self._upstream = upstream
        self._background = background

    @asynccontextmanager
    async def reserve(
        self, instance: Instance, request_id: str, hand_off: Mapping[str, Any] | None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Hold a slot while the context lasts; yields the fields for the request's body.

        They replace the hand-off's, which the worker has taken over into the slot. Waits until the worker has
        a free slot. Raises WorkerRefused and WorkerDied.
        """
        try:
            fields = await self._fields(instance, request_id, hand_off)
        except WorkerRefused:
            raise  # nothing is reserved, nothing to give back
        except BaseException:
            self._give_back(instance, request_id)
            raise
        try:
            yield fields
        finally:
            self._give_back(instance, request_id)

    async def _fields(
        self, instance: Instance, request_id: str, hand_off: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        body = json.dumps({"request_id": request_id, "hand_off": hand_off}).encode()
        response = await self._upstream.post(instance.url + RESERVE_PATH, body, request_id)
        try:
            answer = await response.read_all()
        finally:
            response.close()
        if response.status != 200:
            raise WorkerDied(f"reserving was answered with status {response.status}")
        return _read_fields(answer)

    def _give_back(self, instance: Instance, request_id: str) -> None:
        self._background.spawn(self._release(instance, request_id))

    async def _release(self, instance: Instance, request_id: str) -> None:
        body = json.dumps({"request_id": request_id}).encode()
        try:
            async with asyncio.timeout(timing.SLOT_RELEASE_TIMEOUT_S):
                (await self._upstream.post(instance.url + RELEASE_PATH, body, request_id)).close()
        except (WorkerRefused, WorkerDied, TimeoutError) as error:
            log.debug("%s takes back by itself what %s had: %r", instance.worker, request_id, error)


def _read_fields(answer: bytes) -> Mapping[str, Any]:
    try:
        return object_field(parse_object(answer), "fields")
    except ValueError:
        raise WorkerDied(
            f"reserving was answered with {answer[:200]!r}; expected: {{'fields': {{...}}}}"
        ) from None
