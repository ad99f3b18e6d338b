"""A text in segments has the same token ids as the whole text, and what is known is not tokenised again."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dynaplan.gateway.kv_routing.tokens import segments
from dynaplan.gateway.kv_routing.tokens.segments import SegmentedTokenizer
from tests.fakes.tokenizers import KINDS, SPECIAL

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
        assert ids(segmented.packed(text)) == whole(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_that_a_tokenizer_adds_by_itself_are_there_on_request(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    packed = SegmentedTokenizer(tokenizer).packed_with_specials("the fox")
    assert ids(packed) == tokenizer.encode("the fox").ids
    assert ids(packed)[0] == tokenizer.token_to_id("<s>")


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


def test_only_the_new_turn_of_a_conversation_is_tokenised() -> None:
    counting = Counting(TOKENIZERS["byte_level_bpe"])
    segmented = SegmentedTokenizer(counting)  # type: ignore[arg-type]
    text = "<|im_start|>system\n" + "be short " * 1000 + "<|im_end|>\n<|im_start|>user\nwho<|im_end|>\n"
    segmented.packed(text)
    before = counting.characters
    turn = "<|im_start|>assistant\na fox<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n"
    segmented.packed(text + turn)
    assert counting.characters - before <= len(turn)


def test_segments_are_forgotten_when_they_take_too_much_memory() -> None:
    counting = Counting(TOKENIZERS["byte_level_bpe"])
    segmented = SegmentedTokenizer(counting, cache_bytes=3000)  # type: ignore[arg-type]
    texts = [f"<s>text {number} " + "the fox " * 20 for number in range(20)]
    for text in texts:
        segmented.packed(text)
    before = counting.characters
    segmented.packed(texts[-1])
    assert counting.characters == before
    segmented.packed(texts[0])
    assert counting.characters == before + len(texts[0])


def test_a_text_of_nothing_but_special_tokens_is_tokenised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_SEGMENTS", 10)
    tokenizer = TOKENIZERS["byte_level_bpe"]
    assert ids(SegmentedTokenizer(tokenizer).packed("<s>a" * 50)) == whole(tokenizer, "<s>a" * 50)
