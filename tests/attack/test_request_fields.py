"""Fields that end or halt an engine are answered 400 before the engine sees them; honest ones pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.engines import registry
from tests.fakes.frontend_runtime import body, stage
from tests.fakes.openai_worker import MODEL, FakeWorker

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

HONEST: dict[str, Any] = {
    "user": "u-1",
    "metadata": {"a": "b"},
    "store": False,
    "stream_options": {"include_usage": True},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "logit_bias": {"50256": -100},
    "n": 1,
    "logprobs": True,
    "top_logprobs": 5,
    "temperature": 0.7,
    "top_p": 1,
    "presence_penalty": -2,
    "frequency_penalty": 2.0,
    "seed": 42,
    "stop": ["\n", "END"],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}
"""What OpenAI's own client sends, all at once."""

DEEP = json.loads('{"items":' * 300 + "1" + "}" * 300)

REFUSED: dict[str, list[dict[str, Any]]] = {
    "llamacpp": [
        {"grammar_triggers": [{"type": 99, "value": "x"}]},
        {"grammar_lazy": True},
        {"preserved_tokens": ["x"]},
        {"n_probs": 100_000},
        {"logprobs": 10**9},
        {"dry_multiplier": 1, "dry_penalty_last_n": 10**9},
        {"repeat_last_n": 10**9},
        {"grammar": "root ::= " + "(" * 100_000},
        {"grammar": "root ::= " + '"a" | ' * 50_000 + '"b"'},
        {"json_schema": {"type": "array", "maxItems": 100_000}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
        {"samplers": ["top_k"] * 100_000},
        {"stop": ["x"] * 100_000},
    ],
    "vllm": [
        {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"prompt_embeds": "AAAA"},
        {"mm_processor_kwargs": {"a": 1}},
        {"n": 10_000},
        {"guided_regex": "(a" * 10_000},
        {"structured_outputs": {"json": DEEP}},
    ],
    "sglang": [
        {"top_logprobs": 1_000_000},
        {"n": 5_000_000},
        {"custom_logit_processor": "gASV"},
        {"session_params": {"id": "x"}},
        {"stop_token_ids": [-1]},
    ],
    "trtllm": [{"lora_request": {"path": "/etc"}}, {"beam_width": 100_000}, {"top_logprobs": 10**6}],
}

EXTRA_BODY: dict[str, dict[str, Any]] = {
    "llamacpp": {
        "grammar": 'root ::= "a"',
        "top_k": 40,
        "min_p": 0.05,
        "cache_prompt": True,
        "mirostat": 2,
        "min_tokens": 8,  # a load generator's, for vLLM
        "skip_special_tokens": True,
        "guided_json": {},  # what it does not know it ignores, behind a frontend as without one
        "keep_alive": "5m",
        "no_such_field": 1,
    },
    "vllm": {"guided_json": {"type": "object"}, "ignore_eos": True, "vllm_xargs": {"a": 1}, "priority": 0},
    "sglang": {"regex": "a+", "separate_reasoning": True, "top_k": -1, "lora_path": "x"},
    "trtllm": {"guided_decoding": {"regex": "a+"}, "top_k": 3},
    "sim": {"ignore_eos": True, "anything": 1},
    "somebodys": {"anything": 1},
}
"""Fields that are each engine's own, and must work."""


async def engine(here: Any, name: str) -> FakeWorker:
    worker: FakeWorker = await here.worker(card={"engine": name})
    return worker


@pytest.mark.parametrize("name", EXTRA_BODY)
async def test_what_clients_send_honestly_reaches_the_engine_as_it_is(name: str) -> None:
    async with stage(served_model_name=MODEL) as here:
        worker = await engine(here, name)
        fields = {**HONEST, **EXTRA_BODY[name]}
        status, text = await here.post(CHAT, **fields)
        assert status == 200, text
        assert worker.bodies == [body(CHAT, **fields)]


@pytest.mark.parametrize(
    ("name", "fields"), [(name, fields) for name, cases in REFUSED.items() for fields in cases]
)
async def test_what_ends_or_halts_an_engine_does_not_reach_it(name: str, fields: dict[str, Any]) -> None:
    async with stage(served_model_name=MODEL) as here:
        worker = await engine(here, name)
        status, text = await here.post(COMPLETIONS, **fields)
        error = json.loads(text)["error"]
        assert (status, error["type"]) == (400, "invalid_request_error")
        if "The fields beside the prompt take more than" not in error["message"]:
            assert error["code"] == "invalid_field"
            assert error["param"] in fields
            assert repr(error["param"]) in error["message"]
        assert len(error["message"]) < 500
        assert not worker.bodies


def test_every_engine_has_a_list_and_an_unknown_one_none() -> None:
    """Nor has any command: it may be a program that has whatever field."""
    any_field = ("sim", "command")
    assert all(registry.engine_kind(name).api.fields for name in registry.ENGINES if name not in any_field)
    assert not any(registry.engine_kind(name).api.fields for name in any_field)
    assert registry.find_engine("../x") is None
