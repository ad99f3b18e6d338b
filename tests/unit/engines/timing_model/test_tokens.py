"""The simulated engine's tokenizer and its reading of prompts."""

from __future__ import annotations

import pytest

from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.engines.timing_model.tokens import (
    chat_text,
    count_tokens,
    prompt_token_ids,
    split_last_message,
    text_prompt,
    tokenize,
)
from dynaplan.util.errors import UserError


@pytest.mark.parametrize(
    "text", ["", "a", "four", "fives", "ein Gespräch über 天気", "\ud800 lone surrogate"]
)
def test_counting_agrees_with_tokenizing(text: str) -> None:
    assert count_tokens(text) == len(tokenize(text))


def test_a_longer_text_keeps_the_tokens_of_its_beginning() -> None:
    text = "the quick brown fox jumps"
    assert tokenize(text + " over the lazy dog")[: len(text) // 4] == tokenize(text)[: len(text) // 4]


def test_a_chat_is_flattened_with_roles_and_text_parts() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": None},
    ]
    text = chat_text(messages)
    assert text == "<|system|>\nbe brief\n<|user|>\nhello\n<|assistant|>\n\n<|assistant|>\n"


def test_a_chat_that_is_to_be_continued_ends_with_the_beginning_of_its_answer() -> None:
    asked = [{"role": "user", "content": "hello"}]
    begun = {"messages": [*asked, {"role": "assistant", "content": "Well,"}], "continue_final_message": True}
    assert text_prompt(begun, is_chat=True) == chat_text(asked) + "Well,"
    assert split_last_message(begun["messages"]) == (chat_text(asked), "Well,")


@pytest.mark.parametrize(
    "messages", [None, [], [{"role": "assistant", "content": "a"}], [{"role": "user"}] * 2]
)
def test_a_chat_without_a_begun_answer_cannot_be_continued(messages: object) -> None:
    with pytest.raises(UserError, match="continue_final_message"):
        text_prompt({"messages": messages, "continue_final_message": True}, is_chat=True)


@pytest.mark.parametrize("prompt", ["a text", ["a text"], [1, 2, 3], [[1, 2, 3]]])
def test_every_form_of_one_prompt_is_read(prompt: object) -> None:
    assert len(prompt_token_ids({"prompt": prompt}, is_chat=False)) >= 2


@pytest.mark.parametrize(
    "prompt", [None, "", [], ["a", "b"], [1, -2], [2**32], [1.5], [True], {"a": 1}, [[]], [[1], [2]]]
)
def test_anything_else_is_refused(prompt: object) -> None:
    with pytest.raises(UserError, match="prompt"):
        prompt_token_ids({"prompt": prompt}, is_chat=False)


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{}], ["hi"], [{"role": "user", "content": 5}], [{"role": "user", "content": [{}]}]],
)
def test_anything_but_messages_is_refused(messages: object) -> None:
    with pytest.raises(UserError):
        chat_text(messages)


def test_block_hashes_depend_on_everything_before_the_block() -> None:
    first, second = block_hashes([1, 2, 3, 4, 5], 2), block_hashes([9, 2, 3, 4], 2)
    assert len(first) == len(second) == 2
    assert first[1] != second[1]
    assert block_hashes([1, 2, 3, 4, 7], 2) == first
