"""Prompts that end with the beginning of their own answer, which the simulated engine goes on with.

A real model goes on with any text. This one has one answer for each prompt, so it looks for the place where
the prompt ends and the answer begins: a chat says it (``continue_final_message``), and in a completion's
text the answer is known by its first words.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from dynaplan.engines.timing_model.tokens import begun_answer, continues, text_prompt

INTRODUCTION = "This is dynaplan's simulated engine: no model runs here, the words only keep its pace. "
"""The beginning of every answer."""

LEAST_CHARACTERS = 4
"""Characters of the introduction, one token, by which a beginning of an answer is known."""

_FILLER = frozenset(string.ascii_lowercase + " ")


def split(body: Mapping[str, Any], *, is_chat: bool) -> tuple[str, str] | None:
    """Split a prompt into the text before its answer and the answer's beginning; None when it has none."""
    if is_chat:
        return begun_answer(body.get("messages")) if continues(body) else None
    prompt = text_prompt(body, is_chat=False)
    at = _beginning(prompt) if isinstance(prompt, str) else 0
    return (prompt[:at], prompt[at:]) if at and isinstance(prompt, str) else None


def _beginning(prompt: str) -> int:
    """Return the place in the prompt where an answer of this engine begins; 0 or less for none."""
    whole = prompt.rfind(INTRODUCTION)
    if whole > 0 and _FILLER.issuperset(prompt[whole + len(INTRODUCTION) :]):
        return whole
    for length in range(len(INTRODUCTION), LEAST_CHARACTERS - 1, -1):
        if prompt.endswith(INTRODUCTION[:length]):
            return len(prompt) - length
    return 0
