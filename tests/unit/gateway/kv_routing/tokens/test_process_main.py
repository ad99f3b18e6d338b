"""The other side of the tokenising process: what it answers, and that a template's time is bounded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.gateway.kv_routing.tokens import process_main
from dynaplan.gateway.kv_routing.tokens.process_main import answered, model_reader
from tests.fakes.tokenizers import CHATML, byte_level_bpe, write_model

PROMPT = "the quick brown fox jumps over the lazy dog"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
CHAT_TEXT = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_bpe()


FAULT = -1
"""In place of the tokens where there are none."""

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def ask(tmp_path: Path, tokenizer: Tokenizer) -> Ask:
    """Ask a process of this model one question: the number of tokens and the hashes, or the fault."""

    def asked(body: object, *, is_chat: bool = True, template: str = CHATML) -> tuple[int, Any]:
        packed = model_reader(write_model(tmp_path, tokenizer, template), "")
        question = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer, data = answered(packed, {"block_tokens": 4, "is_chat": is_chat}, question)
        hashes = list(struct.unpack(f"<{len(data) // 8}Q", data))
        return answer.get("tokens", FAULT), answer.get("error", hashes)

    return asked


def test_a_chat_has_the_tokens_of_its_text_and_none_that_the_tokenizer_adds(
    ask: Ask, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(CHAT_TEXT, add_special_tokens=False).ids
    assert ask(CHAT) == (len(ids), block_hashes(ids, 4))
    with_specials = tokenizer.encode(CHAT_TEXT).ids
    assert ask({**CHAT, "add_special_tokens": True}) == (len(with_specials), block_hashes(with_specials, 4))


def test_a_completion_begins_as_the_tokenizer_says(ask: Ask, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    for prompt in (PROMPT, [PROMPT]):
        assert ask({"prompt": prompt}, is_chat=False) == (len(ids), block_hashes(ids, 4))
    bare = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    plain = {"prompt": PROMPT, "add_special_tokens": False}
    assert ask(plain, is_chat=False) == (len(bare), block_hashes(bare, 4))


@pytest.mark.parametrize(
    ("body", "template", "fault"),
    [
        (CHAT, "{{ raise_exception('not so') }}", "TemplateError: not so"),
        (CHAT, "{{ 1 / 0 }}", "ZeroDivisionError"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, CHATML, "is no text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, CHATML, "TypeError"),
        ({}, CHATML, "KeyError"),
        (b"[", CHATML, "JSONDecodeError"),
    ],
)
def test_what_cannot_be_tokenised_is_answered_with_the_fault(
    ask: Ask, body: object, template: str, fault: str
) -> None:
    tokens, reason = ask(body, template=template)
    assert tokens == FAULT
    assert fault in reason


def test_a_template_that_takes_too_long_is_interrupted(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_main, "TEMPLATE_S", 0.05)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokens, reason = ask(CHAT, template=loops)
    assert (tokens, reason) == (FAULT, "TimeoutError: the chat template takes too long")
