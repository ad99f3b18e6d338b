"""The tokenising process, a helper (``dynaplan.process.helper``): ``process_main ... DIRECTORY [TEMPLATE]``.

- ``{"block_tokens": ..., "is_chat": ...}`` and a request's body is answered with ``{"tokens": ...}``, the
  number of the prompt's tokens, and the chained hashes of its full blocks, each in 64 bits.
- ``{}`` asks whether the model could be read, and is answered with ``{}``.
- ``{"error": ...}`` says why there are no tokens. After one in answer to ``{}`` the process ends.

It has a bounded memory, a bounded time for a template, and nothing of the frontend's environment.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dynaplan.engines.timing_model.kv_blocks import TOKEN_BYTES, packed_block_hashes
from dynaplan.process.helper_main import Channel, become_helper

TEMPLATE_S = 1.0
"""Time that a template may take for one chat; a long conversation takes some milliseconds."""

LONGEST_FAULT = 400

Packed = Callable[[bytes, bool], bytes]
"""Makes packed token ids of a request's body, which is a chat or not."""


def model_reader(directory: Path, template: str) -> Packed:
    """Return the function that tokenises for this model; raises what reading the model's files raises."""
    from tokenizers import Tokenizer

    from dynaplan.gateway.kv_routing.tokens.chat_templates import ChatTemplates
    from dynaplan.gateway.kv_routing.tokens.files import TOKENIZER, read_chat_files
    from dynaplan.gateway.kv_routing.tokens.segments import SegmentedTokenizer

    tokenizer = SegmentedTokenizer(Tokenizer.from_file(str(directory / TOKENIZER)))
    chats = ChatTemplates(read_chat_files(directory, template))

    def packed(body: bytes, is_chat: bool) -> bytes:
        document = json.loads(body)
        if is_chat:
            text, has_specials = within(TEMPLATE_S, lambda: chats.text(document)), False
        else:
            prompt = document["prompt"]
            text, has_specials = prompt[0] if isinstance(prompt, list) else prompt, True
        if document.get("add_special_tokens", has_specials):
            return tokenizer.packed_with_specials(text)
        return tokenizer.packed(text)

    return packed


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


def answered(packed: Packed, question: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the answer to one question: the object, and the hashes."""
    try:
        ids = packed(body, question["is_chat"])
    except MemoryError:
        return fault("the prompt takes too much memory")
    except Exception as error:  # a template is somebody's program: it may raise anything
        return fault(f"{type(error).__name__}: {error}")
    hashes = array("Q", packed_block_hashes(ids, question["block_tokens"])).tobytes()
    return {"tokens": len(ids) // TOKEN_BYTES}, hashes


def fault(reason: str) -> tuple[dict[str, Any], bytes]:
    """Return the answer that there are no tokens, and why."""
    return {"error": reason[:LONGEST_FAULT]}, b""


def serve(packed: Packed, channel: Channel) -> None:
    """Answer each question with block hashes, until the frontend closes the pipe."""
    for question, body in channel:
        channel.answer(*(answered(packed, question, body) if question else ({}, b"")))


def main(arguments: Sequence[str]) -> None:
    """Become the process that the frontend has started."""
    channel, (directory, *template) = become_helper(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        packed = model_reader(Path(directory), "".join(template))
    except Exception as error:  # the library raises Exception itself for a file that it cannot read
        channel.answer(*fault(f"{directory} cannot be read: {error}"))
        return
    gc.freeze()
    serve(packed, channel)


if __name__ == "__main__":
    main(sys.argv[1:])
