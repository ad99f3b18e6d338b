"""The tokenizing process in real life: answers, and what becomes of requests when it does not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.gateway import timing
from dynaplan.gateway.kv_routing import tokenizing
from dynaplan.gateway.kv_routing.tokenizing import ModelTokenizers, TokenizingProcess
from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, COMPLETIONS, Call, PromptBlocks, parse_call
from tests.fakes.polling import eventually
from tests.fakes.processes import freeze
from tests.fakes.tokenizers import CHATML, byte_level_bpe, write_model


def chat(content: str) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return parse_call(CHAT_COMPLETIONS, json.dumps(body).encode())


@asynccontextmanager
async def running_tokenizer(directory: Path, template: str = CHATML) -> AsyncIterator[TokenizingProcess]:
    tokenizer = TokenizingProcess(write_model(directory, template=template))
    tokenizer.start()
    try:
        await eventually(lambda: not tokenizer.fault)
        yield tokenizer
    finally:
        await tokenizer.close()


async def test_many_prompts_at_once_have_the_tokens_of_their_model(tmp_path: Path) -> None:
    own = byte_level_bpe()
    async with running_tokenizer(tmp_path) as tokenizer:
        texts = [f"the fox number {number} " * (number + 1) for number in range(50)]
        found = await asyncio.gather(*(tokenizer.blocks(chat(text), 4) for text in texts))
        for text, blocks in zip(texts, found, strict=True):
            rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            ids = own.encode(rendered, add_special_tokens=False).ids
            assert blocks == PromptBlocks(tuple(block_hashes(ids, 4)), 4, len(ids))
        completion = parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": "the fox"}).encode())
        ids = own.encode("the fox").ids
        assert await tokenizer.blocks(completion, 4) == PromptBlocks(tuple(block_hashes(ids, 4)), 4, len(ids))


async def test_a_prompt_that_cannot_be_tokenized_has_no_tokens_and_the_next_one_has(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as tokenizer:
        assert await tokenizer.blocks(chat("\ud800"), 4) is None
        assert await tokenizer.blocks(chat("the fox"), 4)


async def test_a_process_that_hangs_delays_no_request_for_long_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "TOKENS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(tokenizing, "LIMITS", replace(tokenizing.LIMITS, answer_s=6.0, restart_s=(0.0,)))
    async with running_tokenizer(tmp_path) as tokenizer:
        freeze(tokenizer._helper.pid)
        assert await asyncio.gather(*(tokenizer.blocks(chat("fox"), 4) for _ in range(3))) == [None] * 3
        assert not tokenizer.fault  # they have not waited until that is noticed
        await eventually(lambda: "has not answered" in tokenizer.fault)
        monkeypatch.setattr(timing, "TOKENS_TIMEOUT_S", 30.0)
        await eventually(lambda: not tokenizer._helper.pid)
        await tokenizer.blocks(chat("the fox"), 4)
        await eventually(lambda: not tokenizer.fault)
        assert await tokenizer.blocks(chat("the fox"), 4)


async def test_requests_of_a_process_that_was_killed_have_no_tokens_and_it_is_started_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "LIMITS", replace(tokenizing.LIMITS, restart_s=(0.2,)))
    async with running_tokenizer(tmp_path) as tokenizer:
        os.kill(tokenizer._helper.pid, signal.SIGKILL)
        await eventually(lambda: not tokenizer._helper.pid)
        assert await tokenizer.blocks(chat("the fox"), 4) is None
        assert tokenizer.fault.startswith("its process ")

        async def is_back() -> bool:
            return await tokenizer.blocks(chat("the fox"), 4) is not None

        async with asyncio.timeout(30):
            while not await is_back():
                await asyncio.sleep(0.05)


async def test_bodies_beyond_the_bound_have_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "MAX_WAITING_BYTES", 10)
    async with running_tokenizer(tmp_path) as tokenizer:
        assert await tokenizer.blocks(chat("the fox"), 4) is None


async def test_a_model_that_cannot_be_read_is_named_and_predicted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    tokenizers = ModelTokenizers({})
    card = {"engine": "vllm", "tokenizer": str(tmp_path)}
    try:
        tokenizer = tokenizers.of(card)
        assert tokenizer
        await eventually(lambda: "cannot be read" in tokenizers.fault(card))
        assert await tokenizer.blocks(chat("the fox"), 4) is None
    finally:
        await tokenizers.close()


async def test_models_without_a_tokenizer_here_are_named() -> None:
    tokenizers = ModelTokenizers({})
    assert "no tokenizer.json of org/name" in tokenizers.fault({"engine": "vllm", "tokenizer": "org/name"})
    assert "of its own" in tokenizers.fault({"engine": "other", "tokenizer": "m.gguf"})
    await tokenizers.close()
