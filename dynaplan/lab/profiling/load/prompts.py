"""Prompts of an exact number of tokens, the same ones for the same seed."""

from __future__ import annotations

from random import Random

LOWEST_TOKEN, HIGHEST_TOKEN = 100, 299
"""Ids that are ordinary tokens, not control tokens, in the vocabularies of all common models."""


class PromptMaker:
    """Numbered prompts. A shorter prompt is the beginning of a longer one of its number; numbers differ.

    A prefix cache that holds a shorter prompt therefore serves the longer ones of its number, and requests
    of different numbers never share an entry.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._known: dict[int, tuple[Random, list[int]]] = {}

    def prompt(self, number: int, tokens: int) -> list[int]:
        """Return the first ``tokens`` tokens of that prompt."""
        random, known = self._known.setdefault(number, (Random(f"{self._seed}/{number}"), []))
        if len(known) < tokens:
            width = HIGHEST_TOKEN - LOWEST_TOKEN + 1
            known += (LOWEST_TOKEN + int(random.random() * width) for _ in range(tokens - len(known)))
        return known[:tokens]
