"""Prompts of an exact number of tokens, cut out of one long text that is made once.

Token ids are written in three digits, so that a prompt is a slice, and costs nothing however long it is. A
simulated engine gets a text of as many tokens: reading a list of numbers takes milliseconds there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.tokens import BYTES_PER_TOKEN

LOWEST_TOKEN, TOKENS = 100, 200
"""The first of the ids that are used, and their number: ordinary tokens in the vocabularies of all common
models."""

POOL_TOKENS = 1 << 16
"""The length of the text that prompts are cut out of."""

MARK_TOKENS = 9
"""The tokens at the beginning of a prompt or block that tell it from all others: 200^9 are more than 2^64."""


class PromptPool:
    """Prompts as JSON: of token ids, or with ``is_text`` a text for the simulated engine's tokenizer.

    No two prompts of ``prompt`` begin alike, but for those whose trace says that they share blocks. Those of
    ``numbered`` are the same each time.
    """

    def __init__(self, *, is_text: bool, seed: int = 1) -> None:
        random = Random(seed)
        self._end = b" " if is_text else b","
        self._is_text = is_text
        self._pool = b"".join(
            random.choices([self._token(number) for number in range(TOKENS)], k=POOL_TOKENS)
        )
        # A run of the same pool after another must not find its prompts in a cache: it counts elsewhere.
        self._numbers = itertools.count(Random().getrandbits(62))

    def prompt(self, request: TracedRequest) -> bytes:
        """Return the prompt of a request of a trace, its shared blocks first."""
        count = request.block_tokens
        shared = [self._piece(block, count) for block in request.block_hashes] if count else []
        left = request.prompt_tokens - count * len(shared)
        return self._json(b"".join([*shared, self._piece(next(self._numbers), left)]))

    def numbered(self, number: int, tokens: int) -> bytes:
        """Return that many tokens: a shorter prompt is the beginning of a longer one of its number.

        A prefix cache that holds the shorter one therefore serves the longer one; of different numbers no two
        begin alike.
        """
        return self._json(self._piece(number, tokens))

    def _json(self, tokens: bytes) -> bytes:
        if self._is_text:
            return b'"' + tokens + b'"'
        return b"[" + tokens[:-1] + b"]"

    def _piece(self, number: int, tokens: int) -> bytes:
        """Return that many tokens, the same for the same number."""
        number %= 1 << 64
        mark = b"".join(itertools.islice(self._digits(number), max(0, min(MARK_TOKENS, tokens))))
        parts, left = [mark], tokens - MARK_TOKENS
        offset = number * 2_654_435_761 % POOL_TOKENS
        while left > 0:
            part = self._pool[BYTES_PER_TOKEN * offset : BYTES_PER_TOKEN * (offset + left)]
            parts.append(part)
            left, offset = left - len(part) // BYTES_PER_TOKEN, 0
        return b"".join(parts)

    def _digits(self, number: int) -> Iterator[bytes]:
        while True:
            number, digit = divmod(number, TOKENS)
            yield self._token(digit)

    def _token(self, number: int) -> bytes:
        return str(LOWEST_TOKEN + number).encode() + self._end
