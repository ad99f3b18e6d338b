"""Requests of the simulated engine's other paths: what is read of them, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from dynaplan.engines.sim.extra_apis import (
    chat_of_response,
    detokenize,
    embedding_prompts,
    embeddings_document,
    tokenize_response,
)
from dynaplan.util.errors import UserError

REFUSED: list[tuple[Callable[[Any], Any], Any, str]] = [
    (chat_of_response, [], "must be a JSON object"),
    (chat_of_response, {"input": []}, "'input' is"),
    (chat_of_response, {"input": 7}, "'input' is 7"),
    (lambda body: embedding_prompts(body, 100), [], "must be a JSON object"),
    (lambda body: embedding_prompts(body, 100), {}, "'input' is None"),
    (lambda body: embedding_prompts(body, 100), {"input": ["a", {}]}, "expected a text, token ids"),
    (
        lambda body: embedding_prompts(body, 100),
        {"input": ["a", "b" * 400]},
        "the input of 100 leaves",
    ),
    (lambda body: embeddings_document(body, [(1,)], "m"), {"dimensions": 5000}, "from 1 to 4096"),
    (lambda body: embeddings_document(body, [(1,)], "m"), {"encoding_format": "int8"}, "'float' or 'base64'"),
    (lambda body: tokenize_response(body, 100), 7, "must be a JSON object"),
    (lambda body: tokenize_response(body, 100), {}, "'prompt' must be"),
    (detokenize, {"tokens": "x"}, "'tokens' is 'x'"),
    (detokenize, {"tokens": [2**40]}, "expected a list of token ids"),
    (detokenize, [], "'tokens' is None"),
]


@pytest.mark.parametrize(("read", "body", "words"), REFUSED)
def test_what_has_no_answer_is_refused_in_words(read: Callable[[Any], Any], body: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(body)


def test_a_response_is_asked_for_as_a_chat() -> None:
    body = {
        "model": "m",
        "instructions": "Be short.",
        "input": "Why?",
        "max_output_tokens": 9,
        "stream": True,
    }
    assert chat_of_response(body) == {
        "model": "m",
        "stream": True,
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}],
        "max_tokens": 9,
    }


def test_a_vector_has_length_one_and_is_the_same_for_the_same_tokens() -> None:
    document = embeddings_document({}, [(1, 2), (3,), (1, 2)], "m")
    first, second, third = (each["embedding"] for each in document["data"])
    assert first == third != second
    assert math.hypot(*first) == pytest.approx(1)
    assert document["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_tokens_become_their_text_again() -> None:
    tokens = tokenize_response({"prompt": "a blue sky"}, 100)["tokens"]
    assert detokenize({"tokens": list(tokens)}) == "a blue sky"
    assert detokenize({"tokens": []}) == ""
