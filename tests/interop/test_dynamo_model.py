"""The program of the guide makes a deployment a model of Dynamo's frontend (ai-dynamo 1.6.1)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from dynaplan.util.sockets import free_port
from tests.e2e.deployment import MODEL, REPOSITORY, Deployment
from tests.fakes.polling import eventually
from tests.interop.conftest import Programs

GUIDE = REPOSITORY / "docs" / "guides" / "orchestrating.md"
WITHIN_S = 120.0
TOKENS = 20


def example() -> str:
    """The guide's program."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    (found,) = (block for block in blocks if "register_model" in block)
    return str(found)


async def test_it_is_listed_and_answers_whole_and_streamed(
    python: str, deploy: Callable[..., Deployment], programs: Programs, tmp_path: Path
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml")
    program = tmp_path / "offer.py"
    program.write_text(example())
    own_store = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "dynamo")}
    environment = {**os.environ, **own_store, "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp"}
    port = free_port()
    programs.start([python, str(program), deployment.url, MODEL], environment)
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    programs.start(frontend, environment)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:

        async def is_listed() -> bool:
            try:
                async with session.get(f"{url}/v1/models") as response:
                    return MODEL in [each["id"] for each in (await response.json())["data"]]
            except aiohttp.ClientError:
                return False

        try:
            await eventually(is_listed, WITHIN_S)
            whole = await asked(session, url)
            pieces = await streamed(session, url)
        except BaseException as error:
            raise AssertionError(f"{error}\n{programs.text}") from error
    assert whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == TOKENS
    assert "".join(pieces)
    assert len(pieces) > 1


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me about the lights."}]
    return {"model": MODEL, "messages": messages, "max_tokens": TOKENS, **more}


async def asked(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.post(f"{url}/v1/chat/completions", json=body()) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def streamed(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The pieces of text of a streamed answer."""
    async with session.post(f"{url}/v1/chat/completions", json=body(stream=True)) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    assert lines and "data: [DONE]" in lines
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]
