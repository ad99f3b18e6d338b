"""An engine goes on with a begun answer; greedily decoded, with the text of an uncut one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynaplan.engines import registry
from dynaplan.gateway.migration import make_continuation
from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, Call, parse_call
from tests.contract.engine_workers import KINDS, Kind, Worker, starting

TOKENS = 16


@pytest.fixture(params=sorted(KINDS))
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Kind, Worker]]:
    kind = KINDS[request.param]
    pytest.importorskip(kind.module)
    async with starting(tmp_path) as start_any:
        yield kind, await start_any(kind.name, kind.options(request))


async def texts(worker: Worker, call: Call) -> list[str]:
    """The text of each token of a stream."""
    events = await worker.stream(dict(call.document), call.endpoint.path)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


async def test_a_begun_answer_goes_on_where_it_was_cut(engine: tuple[Kind, Worker]) -> None:
    kind, worker = engine
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    fields: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "messages": messages}
    asked = parse_call(CHAT_COMPLETIONS, json.dumps(fields).encode())
    whole = await texts(worker, asked)
    for tokens in (3, 7, 11):
        begun = "".join(whole[:tokens])
        rest = make_continuation(asked, begun, tokens, registry.engine_kind(kind.name).api)
        sent = begun.removesuffix(rest.held)
        assert sent + "".join(await texts(worker, rest.call)) == "".join(whole)
