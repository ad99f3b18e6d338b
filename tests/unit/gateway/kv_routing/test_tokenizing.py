"""Prompts as KV blocks: by the model's tokens where they are known, else by an estimate of the text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.engines.timing_model.tokens import prompt_token_ids
from dynaplan.gateway.kv_routing import tokenizing
from dynaplan.gateway.kv_routing.tokenizing import (
    DEFAULT_BLOCK_TOKENS,
    Tokenizer,
    block_tokens_of,
    prompt_blocks,
    token_fault,
)
from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, COMPLETIONS, Call, PromptBlocks, parse_call

SIM = {"tokenizer": "sim", "kv_block_tokens": 4}
OTHER = {"tokenizer": "/models/m", "kv_block_tokens": 4}


def completion(prompt: object) -> Call:
    return parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())


class Known:
    """A tokenizer of every worker, which answers each prompt with the same blocks."""

    def __init__(self, answer: PromptBlocks | None) -> None:
        self.answer = answer

    def of(self, card: Mapping[str, Any]) -> Tokenizer | None:
        return self

    def fault(self, card: Mapping[str, Any]) -> str:
        return "" if self.answer else "no reason"

    async def blocks(self, call: Call, block_tokens: int) -> PromptBlocks | None:
        return self.answer


@pytest.mark.parametrize("text", ["a", "a prompt of several blocks: \u00e4\u00f6\u00fc \U0001f600", "x" * 64])
async def test_a_text_for_a_simulated_engine_has_the_hashes_of_the_engines_own_tokens(text: str) -> None:
    for endpoint, body in (
        (COMPLETIONS, {"model": "m", "prompt": text}),
        (CHAT_COMPLETIONS, {"model": "m", "messages": [{"role": "user", "content": text}]}),
    ):
        call = parse_call(endpoint, json.dumps(body).encode())
        tokens = prompt_token_ids(body, is_chat=endpoint.is_chat)
        assert await prompt_blocks(call, SIM, None) == PromptBlocks(
            tuple(block_hashes(tokens, 4)), 4, len(tokens)
        )


async def test_a_long_text_is_hashed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    call = completion("a text of several blocks and then of many more " * 10)
    whole = await prompt_blocks(call, SIM, None)
    monkeypatch.setattr(tokenizing, "BLOCKS_AT_ONCE", 3)
    assert await prompt_blocks(call, SIM, None) == whole


async def test_token_ids_are_tokens_of_any_model() -> None:
    blocks = await prompt_blocks(completion([1, 2, 3, 4, 5]), OTHER, None)
    assert blocks == PromptBlocks(tuple(block_hashes([1, 2, 3, 4], 4)), 4, 5)


async def test_a_text_is_cut_by_the_models_tokenizer_or_by_an_estimate_that_says_so() -> None:
    exact = PromptBlocks((1, 2), 4, 9)
    call = completion("a text of more than one block")
    assert await prompt_blocks(call, OTHER, Known(exact)) == exact
    for tokenizers in (None, Known(None)):
        estimated = await prompt_blocks(call, OTHER, tokenizers)
        assert estimated.prompt_tokens == 0
        assert estimated.hashes == (await prompt_blocks(call, SIM, None)).hashes


def test_a_worker_that_does_not_say_its_block_size_has_the_usual_one() -> None:
    assert block_tokens_of({"kv_block_tokens": 64}) == 64
    assert block_tokens_of({"kv_block_tokens": 0}) == DEFAULT_BLOCK_TOKENS
    assert block_tokens_of({}) == DEFAULT_BLOCK_TOKENS


def test_the_simulated_engines_tokenizer_is_always_known() -> None:
    assert token_fault(SIM, None) == ""
    assert token_fault(OTHER, None) == "its tokenizer is not known"
    assert token_fault(OTHER, Known(None)) == "no reason"
    assert token_fault(OTHER, Known(PromptBlocks())) == ""
