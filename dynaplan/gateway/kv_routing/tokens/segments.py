"""Token ids of a text that has grown: only what is new is tokenised.

A tokenizer first cuts a text at its special tokens, as ``<|im_start|>``, and tokenises what is between them
on its own. So the ids of a text are those of its segments one after the other, each from a special token to
before the next, and the segments of a conversation's earlier turns are known.

That is true only of a cut before a special token that the tokenizer finds in the raw text (``normalized``
is false), that takes no white space from before it (``lstrip``), and that does not depend on its neighbours
(``single_word``). Where two special tokens overlap, the leftmost and then the longest is meant, as in the
library ``tokenizers``.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as ModelTokenizer

CACHE_BYTES = 64 * 1024 * 1024
"""Memory for the segments that are remembered, in bytes: about 5 million tokens with their text."""

MOST_SEGMENTS = 20_000
"""Segments of one text, above which it is tokenised whole: each costs some microseconds by itself."""


class SegmentedTokenizer:
    """Tokenises texts, without those tokens that a tokenizer adds by itself, and remembers segments."""

    def __init__(self, tokenizer: ModelTokenizer, cache_bytes: int = CACHE_BYTES) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        found = [each for each in tokenizer.get_added_tokens_decoder().values() if not each.normalized]
        self._cuts = frozenset(
            each.content for each in found if each.content and not each.lstrip and not each.single_word
        )
        self._pattern = _any_of(each.content for each in found)
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._left_bytes = cache_bytes

    def packed(self, text: str) -> bytes:
        """Return the text's token ids, each in 32 bits, little-endian."""
        segments = self._segments(text)
        missing = [each for each in dict.fromkeys(segments) if each not in self._known]
        new = dict(zip(missing, self._tokenised(missing), strict=True))
        for each in segments:
            if each not in new:
                self._known.move_to_end(each)
        ids = b"".join([new[each] if each in new else self._known[each] for each in segments])
        self._remember(new)
        return ids

    def packed_with_specials(self, text: str) -> bytes:
        """Return the ids with those tokens that the tokenizer adds by itself, as a beginning of the text."""
        return _packed(self._tokenizer.encode(text).ids)

    def _segments(self, text: str) -> list[str]:
        begins = [0]
        if self._pattern:
            cuts = (each.start() for each in self._pattern.finditer(text) if each.group() in self._cuts)
            begins += [cut for cut in cuts if cut]
        if len(begins) > MOST_SEGMENTS:
            return [text]
        return [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    def _tokenised(self, texts: list[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        return [_packed(each.ids) for each in encodings]

    def _remember(self, new: dict[str, bytes]) -> None:
        for text, ids in new.items():
            self._known[text] = ids
            self._left_bytes -= _size(text, ids)
        while self._left_bytes < 0:
            text, ids = self._known.popitem(last=False)
            self._left_bytes += _size(text, ids)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the leftmost of the texts, and of several there the longest."""
    longest_first = sorted(filter(None, set(texts)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _packed(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


def _size(text: str, ids: bytes) -> int:
    return 4 * len(text) + len(ids) + 200
