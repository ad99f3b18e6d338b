"""A text in segments has the same token ids as the whole text; a template's time is bounded."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.gateway.kv_routing import tokenizer_main
from dynaplan.gateway.kv_routing.tokenizer_main import SegmentedTokenizer, make_answer, model_reader
from tests.fakes.tokenizers import CHATML, KINDS, SPECIAL, byte_level_bpe, write_model

TOKENIZERS = {name: make() for name, make in KINDS.items()}

MARKS = (*SPECIAL, "<left>", "<right>", "<word>", "<|im_start|><s>", "<|im", "<plain>", "Fox")
WORDS = (
    "fox",
    " ",
    "  ",
    "\n",
    "the",
    "The quick",
    "a\u0301",
    "\u00e4",
    "\U0001f600",
    "\u2581",
    "start|>",
    "<",
)
PIECES = st.sampled_from((*MARKS, *WORDS))
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def ids(packed: bytes) -> list[int]:
    return list(array("I", packed))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(turns=st.lists(TEXTS, min_size=1, max_size=6))
def test_a_conversation_that_grows_has_the_tokens_of_its_whole_text(name: str, turns: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    segmented = SegmentedTokenizer(tokenizer)
    text = ""
    for turn in turns:
        text += turn
        assert ids(segmented.encode(text)) == whole(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_that_a_tokenizer_adds_by_itself_are_there_on_request(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoded = SegmentedTokenizer(tokenizer).encode_with_specials("the fox")
    assert ids(encoded) == tokenizer.encode("the fox").ids
    assert ids(encoded)[0] == tokenizer.token_to_id("<s>")


class Counting:
    """A tokenizer that counts the characters that it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **more: object) -> object:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **more)


def test_only_the_new_turn_of_a_conversation_is_tokenized() -> None:
    counting = Counting(TOKENIZERS["byte_level_bpe"])
    segmented = SegmentedTokenizer(counting)  # type: ignore[arg-type]
    text = "<|im_start|>system\n" + "be short " * 1000 + "<|im_end|>\n<|im_start|>user\nwho<|im_end|>\n"
    segmented.encode(text)
    before = counting.characters
    turn = "<|im_start|>assistant\na fox<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n"
    segmented.encode(text + turn)
    assert counting.characters - before <= len(turn)


def test_segments_are_forgotten_when_they_take_too_much_memory() -> None:
    counting = Counting(TOKENIZERS["byte_level_bpe"])
    segmented = SegmentedTokenizer(counting, cache_bytes=3000)  # type: ignore[arg-type]
    texts = [f"<s>text {number} " + "the fox " * 20 for number in range(20)]
    for text in texts:
        segmented.encode(text)
    before = counting.characters
    segmented.encode(texts[-1])
    assert counting.characters == before
    segmented.encode(texts[0])
    assert counting.characters == before + len(texts[0])


def test_a_text_of_nothing_but_special_tokens_is_tokenized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_main, "MAX_SEGMENTS", 10)
    tokenizer = TOKENIZERS["byte_level_bpe"]
    assert ids(SegmentedTokenizer(tokenizer).encode("<s>a" * 50)) == whole(tokenizer, "<s>a" * 50)


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
        encode = model_reader(write_model(tmp_path, tokenizer, template), "")
        question = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer, data = make_answer(encode, {"block_tokens": 4, "is_chat": is_chat}, question)
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
def test_what_cannot_be_tokenized_is_answered_with_the_fault(
    ask: Ask, body: object, template: str, fault: str
) -> None:
    tokens, reason = ask(body, template=template)
    assert tokens == FAULT
    assert fault in reason


def test_a_template_that_takes_too_long_is_interrupted(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_main, "TEMPLATE_S", 0.05)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokens, reason = ask(CHAT, template=loops)
    assert (tokens, reason) == (FAULT, "TimeoutError: the chat template takes too long")
