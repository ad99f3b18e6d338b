"""Prompts have exactly their tokens, and share exactly what their trace says."""

from __future__ import annotations

import json

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.tokens import tokenize
from dynaplan.lab.profiling.load.prompts import POOL_TOKENS, PromptPool


def tokens_of(pool: PromptPool, request: TracedRequest) -> list[int]:
    """The token ids of one prompt, as the service that gets it counts them."""
    prompt = json.loads(pool.prompt(request))
    return list(tokenize(prompt)) if isinstance(prompt, str) else prompt


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("length", [1, 5, 9, 10, 3000, POOL_TOKENS + 100])
def test_a_prompt_has_exactly_its_tokens(is_text: bool, length: int) -> None:
    assert len(tokens_of(PromptPool(is_text=is_text), TracedRequest(0.0, length, 10))) == length


@pytest.mark.parametrize("is_text", [True, False])
def test_no_two_prompts_begin_alike(is_text: bool) -> None:
    pool = PromptPool(is_text=is_text)
    begins = {tuple(tokens_of(pool, TracedRequest(0.0, 100, 10))[:16]) for _ in range(500)}
    assert len(begins) == 500


def test_prompts_share_the_blocks_that_their_trace_says_they_share() -> None:
    pool = PromptPool(is_text=False)
    one = tokens_of(pool, TracedRequest(0.0, 150, 10, (7, 8), 64))
    other = tokens_of(pool, TracedRequest(1.0, 150, 10, (7, 9), 64))
    assert (len(one), len(other)) == (150, 150)
    assert one[:64] == other[:64]
    assert one[64:128] != other[64:128]


def test_a_negative_hash_is_a_block_like_any_other() -> None:
    assert len(tokens_of(PromptPool(is_text=False), TracedRequest(0.0, 40, 10, (-5, -6), 16))) == 40


def numbered(pool: PromptPool, number: int, tokens: int) -> list[int]:
    """The token ids of a numbered prompt."""
    prompt = json.loads(pool.numbered(number, tokens))
    return list(tokenize(prompt)) if isinstance(prompt, str) else prompt


@pytest.mark.parametrize("is_text", [True, False])
def test_a_shorter_prompt_begins_the_longer_one_of_its_number_also_in_another_pool(is_text: bool) -> None:
    pool = PromptPool(is_text=is_text, seed=1)
    assert len(numbered(pool, 3, 777)) == 777
    assert numbered(pool, 3, 500)[:100] == numbered(pool, 3, 100)
    assert numbered(PromptPool(is_text=is_text, seed=1), 3, 100) == numbered(pool, 3, 100)


def test_no_two_numbers_begin_alike() -> None:
    pool = PromptPool(is_text=False)
    assert len({tuple(numbered(pool, number, 16)) for number in range(500)}) == 500
