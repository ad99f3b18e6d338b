"""An engine that does nothing and answers plainly: a test overrides what it is about."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.engines.port import BlockChangesCallback, HandOffReady
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.http.routes import Route


class PlainEngine:
    """``dynaplan.engines.port.Engine`` that answers on the worker's own server and holds nothing."""

    url = ""
    waits_for_release = False

    def subscribe_kv_events(self, changed: BlockChangesCallback) -> bool:
        return False

    async def start(self) -> None: ...

    async def stop(self, *, keeps_cache: bool = False) -> None: ...

    async def wait_for_failure(self) -> None:
        await asyncio.Event().wait()

    def card(self) -> Mapping[str, Any]:
        return {"model": "m"}

    def load(self) -> WorkerLoad:
        return WorkerLoad()

    def metrics(self) -> Mapping[str, float]:
        return {}

    def routes(self) -> Sequence[Route]:
        return ()

    async def count_requests(self) -> int:
        return 0

    async def sleep(self, level: str) -> str:
        return "it has no way to sleep."

    async def wake(self) -> str:
        return ""

    async def prefill(self, request: RemotePrefillRequest, hand_off_ready: HandOffReady) -> None: ...

    def release(self, request_id: str) -> None: ...

    def release_all(self) -> None: ...
