"""An engine that is dead behind its living server counts as a death, for the request that has killed it.

The workers copy vLLM 0.32: when the engine's core has died, every request there is answered 500 with an
EngineDeadError's words, or gets them as an event in its stream and then [DONE]; some seconds later the server
ends, too.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from tests.attack.test_poison import COMPLETIONS, Hospital, MortalWorker
from tests.fakes.frontend_runtime import stage
from tests.fakes.openai_worker import MODEL
from tests.fakes.polling import eventually

DEAD = {
    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


class WorkerWithAMortalEngine(MortalWorker):
    """Its server goes on when a request with ``deadly`` set has killed its engine."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.card["engine"] = "vllm"

    async def _act(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        self.dead |= bool(body.get("deadly"))
        if not self.dead:
            return await super()._act(request, body)
        if not body.get("stream"):
            return web.json_response({"error": DEAD}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps({"error": DEAD}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_kills_engines_behind_their_servers_is_found_out(is_stream: bool) -> None:
    async with stage(served_model_name=MODEL) as here:
        hospital = Hospital(here, 3, WorkerWithAMortalEngine)
        here.runtime.spawn(hospital.keep(), "hospital")
        await eventually(lambda: len(hospital.workers) == 3)
        for _ in range(10):
            status, text = await here.post(
                COMPLETIONS, prompt="deadly", deadly=True, max_tokens=4, stream=is_stream
            )
            assert (status, json.loads(text)["error"]["code"]) == (500, "request_kills_workers")
        assert hospital.deaths == 2
        assert (await here.post(COMPLETIONS, prompt="hi", max_tokens=4))[0] == 200


async def test_any_other_error_500_is_no_death() -> None:
    async with stage(served_model_name=MODEL) as here:
        worker = await here.worker("error_500", card={"engine": "vllm"})
        for _ in range(5):
            status, text = await here.post(COMPLETIONS, prompt="hi")
            assert (status, json.loads(text)["error"]["message"]) == (500, "shut down")
        assert len(worker.bodies) == 5
