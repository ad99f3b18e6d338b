"""The tokenising process: ``python -m ...process_main PARENT_PID DIRECTORY [TEMPLATE]``.

It reads questions and writes answers, in their order, until its input ends:

- a question is ``QUESTION``: the length of the body in bytes, the tokens of a block, 1 for a chat; then the
  request's body. A body of no length asks whether the model could be read.
- an answer is ``ANSWER``: the number of the prompt's tokens, and of bytes that follow; then the chained
  hashes of its full blocks, each in 64 bits. ``FAULT`` for the tokens: a text follows, which says why.

It has a bounded memory, a bounded time for a template, and nothing of the frontend's environment.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import struct
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from dynaplan.engines.timing_model.kv_blocks import TOKEN_BYTES, packed_block_hashes
from dynaplan.process.parent_death import die_with_parent

QUESTION = struct.Struct("<IIB")
ANSWER = struct.Struct("<II")
FAULT = 2**32 - 1

TEMPLATE_S = 1.0
"""Time that a template may take for one chat; a long conversation takes some milliseconds."""

MEMORY_BYTES = 6 * 1024**3
"""Memory that may be addressed; the tokenizer of 200,000 words takes about 300 MB."""

LONGEST_FAULT_BYTES = 400

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


def answered(packed: Packed, body: bytes, block_tokens: int, is_chat: bool) -> bytes:
    """Return the answer to one question."""
    try:
        ids = packed(body, is_chat)
    except MemoryError:
        return fault("the prompt takes too much memory")
    except Exception as error:  # a template is somebody's program: it may raise anything
        return fault(f"{type(error).__name__}: {error}")
    hashes = array("Q", packed_block_hashes(ids, block_tokens)).tobytes()
    return ANSWER.pack(len(ids) // TOKEN_BYTES, len(hashes)) + hashes


def fault(reason: str) -> bytes:
    """Return the answer that there are no tokens, and why."""
    text = reason.encode(errors="replace")[:LONGEST_FAULT_BYTES]
    return ANSWER.pack(FAULT, len(text)) + text


def serve(packed: Packed, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer each question with block hashes, until the frontend closes the pipe."""
    while len(head := questions.read(QUESTION.size)) == QUESTION.size:
        length, block_tokens, is_chat = QUESTION.unpack(head)
        body = questions.read(length)
        answers.write(answered(packed, body, block_tokens, bool(is_chat)) if length else ANSWER.pack(0, 0))
        answers.flush()


def main(arguments: list[str]) -> None:
    """Become the process that the frontend has started."""
    parent_pid, directory, *template = arguments
    die_with_parent(int(parent_pid))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        packed = model_reader(Path(directory), "".join(template))
    except Exception as error:  # the library raises Exception itself for a file that it cannot read
        reason = f"{directory} cannot be read: {error}"
        sys.stdout.buffer.write(fault(reason))
        return
    gc.freeze()
    serve(packed, sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
