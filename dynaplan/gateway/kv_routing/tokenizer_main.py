"""The tokenizing process: ``tokenizer_main ... DIRECTORY [TEMPLATE]``, a ``dynaplan.process.helper``.

- ``{"block_tokens": ..., "is_chat": ...}`` and a request's body is answered with ``{"tokens": ...}``, the
  number of the prompt's tokens, and the chained hashes of its full blocks, each in 64 bits.
- ``{}`` asks whether the model could be read, and is answered with ``{}``.
- ``{"error": ...}`` says why there are no tokens. After one in answer to ``{}`` the process ends.

It has a bounded memory, a bounded time for a template, and nothing of the frontend's environment.

**Segments.** Of a text that has grown only the new part is tokenized. A tokenizer first cuts a text at its
special tokens, as ``<|im_start|>``, and tokenizes what is between them on its own. So the ids of a text are
those of its segments one after the other, each from a special token to before the next, and the segments of a
conversation's earlier turns are known.

That is true only of a cut before a special token that the tokenizer finds in the raw text (``normalized``
is false), that takes no white space from before it (``lstrip``), and that does not depend on its neighbours
(``single_word``). Where two special tokens overlap, the leftmost and then the longest is meant, as in the
library ``tokenizers``.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dynaplan.engines.timing_model.kv_blocks import TOKEN_BYTES, packed_block_hashes
from dynaplan.process.helper_main import Channel, become_helper

if TYPE_CHECKING:
    from tokenizers import Tokenizer as ModelTokenizer

CACHE_BYTES = 64 * 1024 * 1024
"""Memory for the segments that are remembered, in bytes: about 5 million tokens with their text."""

MAX_SEGMENTS = 20_000
"""Segments of one text, above which it is tokenized whole: each costs some microseconds by itself."""


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

    def encode(self, text: str) -> bytes:
        """Return the text's token ids, each in 32 bits, little-endian."""
        segments = self._segments(text)
        missing = [each for each in dict.fromkeys(segments) if each not in self._known]
        new = dict(zip(missing, self._tokenize(missing), strict=True))
        for each in segments:
            if each not in new:
                self._known.move_to_end(each)
        ids = b"".join([new[each] if each in new else self._known[each] for each in segments])
        self._remember(new)
        return ids

    def encode_with_specials(self, text: str) -> bytes:
        """Return the ids of the text, and of the tokens that the tokenizer adds around it, such as BOS."""
        return _pack(self._tokenizer.encode(text).ids)

    def _segments(self, text: str) -> list[str]:
        begins = [0]
        if self._pattern:
            cuts = (each.start() for each in self._pattern.finditer(text) if each.group() in self._cuts)
            begins += [cut for cut in cuts if cut]
        if len(begins) > MAX_SEGMENTS:
            return [text]
        return [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    def _tokenize(self, texts: list[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        return [_pack(each.ids) for each in encodings]

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


def _pack(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


def _size(text: str, ids: bytes) -> int:
    return 4 * len(text) + len(ids) + 200


TEMPLATE_S = 1.0
"""Time that a template may take for one chat; a long conversation takes some milliseconds."""

MAX_FAULT_CHARACTERS = 400

Encode = Callable[[bytes, bool], bytes]
"""Makes packed token ids of a request's body, which is a chat or not."""


def model_reader(directory: Path, template: str) -> Encode:
    """Return the function that tokenizes for this model; raises what reading the model's files raises."""
    from tokenizers import Tokenizer

    from dynaplan.gateway.kv_routing.chat_templates import ChatTemplates
    from dynaplan.gateway.kv_routing.tokenizer_files import TOKENIZER, read_chat_files
    from dynaplan.gateway.kv_routing.tokenizer_main import SegmentedTokenizer

    tokenizer = SegmentedTokenizer(Tokenizer.from_file(str(directory / TOKENIZER)))
    chats = ChatTemplates(read_chat_files(directory, template))

    def encode(body: bytes, is_chat: bool) -> bytes:
        document = json.loads(body)
        if is_chat:
            text, has_specials = within(TEMPLATE_S, lambda: chats.text(document)), False
        else:
            prompt = document["prompt"]
            text, has_specials = prompt[0] if isinstance(prompt, list) else prompt, True
        if document.get("add_special_tokens", has_specials):
            return tokenizer.encode_with_specials(text)
        return tokenizer.encode(text)

    return encode


def within(seconds: float, work: Callable[[], str]) -> str:
    """Return the result of Python code; raises TimeoutError in the midst of it when the time is over.

    Code of the interpreter itself is not interrupted: then the frontend ends this process.
    """
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the chat template takes too long")


def make_answer(encode: Encode, question: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the answer to one question: the object, and the hashes."""
    try:
        ids = encode(body, question["is_chat"])
    except MemoryError:
        return fault("the prompt takes too much memory")
    except Exception as error:  # a template is somebody's program: it may raise anything
        return fault(f"{type(error).__name__}: {error}")
    hashes = array("Q", packed_block_hashes(ids, question["block_tokens"])).tobytes()
    return {"tokens": len(ids) // TOKEN_BYTES}, hashes


def fault(reason: str) -> tuple[dict[str, Any], bytes]:
    """Return the answer that there are no tokens, and why."""
    return {"error": reason[:MAX_FAULT_CHARACTERS]}, b""


def serve(encode: Encode, channel: Channel) -> None:
    """Answer each question with block hashes, until the frontend closes the pipe."""
    for question, body in channel:
        channel.answer(*(make_answer(encode, question, body) if question else ({}, b"")))


def main(arguments: Sequence[str]) -> None:
    channel, (directory, *template) = become_helper(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        encode = model_reader(Path(directory), "".join(template))
    except Exception as error:  # the library raises Exception itself for a file that it cannot read
        channel.answer(*fault(f"{directory} cannot be read: {error}"))
        return
    gc.freeze()
    serve(encode, channel)


if __name__ == "__main__":
    main(sys.argv[1:])
