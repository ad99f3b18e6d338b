"""A graph of plain services in the scaled roles: no engine, no frontend; starts in half a second."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from dynaplan.sdk import async_on_start, depends, dynamo_context, endpoint, service


@service(dynamo={"component_type": "prefill"}, resources={"gpu": 1})
class PrefillWorker:
    @endpoint()
    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"prefilled": request}


@service(dynamo={"component_type": "decode"}, resources={"gpu": 1})
class VllmWorker:
    prefill = depends(PrefillWorker)

    @async_on_start
    async def begin(self) -> None:
        settings = dynamo_context["runtime"].settings
        if settings.get("has-engine"):
            # As an engine's server: a process group of its own, a child of its own, both deaf to SIGTERM.
            command = "trap '' TERM; (while :; do sleep 1; done) & while :; do sleep 1; done"
            self.engine = subprocess.Popen(["sh", "-c", command], process_group=0)  # noqa: ASYNC220
            scratch = Path(os.environ["DYNAPLAN_SCRATCH_DIR"])
            (scratch / f"{dynamo_context['runtime'].worker_name}.slot").touch()
        if settings.get("loads-for-ever"):
            await asyncio.Event().wait()
        if settings.get("never-starts"):
            from dynaplan.util.errors import WorkerStartFailed

            print("the reason is in the log")
            raise WorkerStartFailed("it was told so")

    @endpoint()
    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "request": request}


@service
class Entry:
    worker = depends(VllmWorker)

    @endpoint()
    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield request
