"""Components alone with a real engine: ``dynaplan frontend`` and ``dynaplan worker --engine vllm``."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.fakes.components import RunningComponent
from tests.vllm.conftest import ON_CPU, START_UP_S

ENGINE = (
    *("--enforce-eager", "--load-format", "dummy", "--dtype", "float32", "--max-model-len", "2048"),
    *("--num-gpu-blocks-override", "100", "--block-size", "32", "--gpus", "0"),
)
"""Flags of vLLM's own, and that the worker takes no GPU."""


def chat(url: str, **fields: object) -> bytes:
    message = {"role": "user", "content": "Tell me about the lights of the city."}
    body = json.dumps({"messages": [message], "max_tokens": 12, "ignore_eos": True, **fields})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: bytes = response.read()
        return answer


async def test_a_frontend_and_a_vllm_worker_answer_a_chat(
    tmp_path: Path, tiny_hf: Path, vllm_python: Path
) -> None:
    environment = {**ON_CPU, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "kv")}

    def component(*words: str) -> RunningComponent:
        made = RunningComponent(tmp_path, environment, *words)
        made.program = str(vllm_python.with_name("dynaplan"))
        return made.spawn()

    model = ("--model", str(tiny_hf), "--served-model-name", "tiny")
    worker = component("worker", "--engine", "vllm", *model, *ENGINE)
    frontend = component("frontend", "--port", "0", "--router-mode", "kv", "--no-kv-events")
    try:
        await frontend.ready()
        await worker.ready(START_UP_S)
        answer = json.loads(chat(frontend.public_url, model="tiny"))
        assert answer["usage"]["completion_tokens"] == 12
        lines = chat(frontend.public_url, model="tiny", stream=True).decode().split("\n\n")
        assert [line for line in lines if line][-1] == "data: [DONE]"
        for each in (worker, frontend):
            each.interrupt()
            assert await each.exit_code() == 0, each.text
    finally:
        for each in (worker, frontend):
            each.kill()
