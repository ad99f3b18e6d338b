"""The helper's side of a helper process (``helper.py``): its bounds, and the questions that it answers.

A helper's module calls ``become_helper`` first of all, and then answers each question of ``Channel``.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from dynaplan.process.kernel import die_with_parent

HEAD = struct.Struct("<II")
"""A message's head: the bytes of its JSON object, and of what follows that."""


class Channel:
    """The questions, an object and bytes each, and the way of the answers, one for each, in their order."""

    def __init__(self, questions: BinaryIO, answers: BinaryIO) -> None:
        self._questions = questions
        self._answers = answers

    def read(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next question; None when the asking process has closed its end."""
        head = self._questions.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        text, payload = [self._questions.read(length) for length in HEAD.unpack(head)]
        return json.loads(text), payload

    def __iter__(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the questions until the input ends."""
        while (question := self.read()) is not None:
            yield question

    def answer(self, document: Mapping[str, Any], payload: bytes = b"") -> None:
        """Write the answer to the oldest question that has none."""
        self._answers.write(pack(document, payload) + payload)
        self._answers.flush()


def pack(document: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """Return a message's head and JSON object; the payload follows them."""
    text = json.dumps(document).encode()
    return HEAD.pack(len(text), len(payload)) + text


def become_helper(arguments: Sequence[str]) -> tuple[Channel, Sequence[str]]:
    """Take on the bounds of a helper; return its questions, and the arguments of its module.

    It dies with the process that asks, leads a process group, and has no more memory than that allows. What a
    library prints goes to standard error.
    """
    parent_pid, memory_bytes, *own = arguments
    die_with_parent(int(parent_pid))
    os.setpgid(0, 0)  # not by whoever starts it: uvloop's subprocesses have no such option
    if int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return Channel(sys.stdin.buffer, answers), own
