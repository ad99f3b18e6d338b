"""Made-up conversations: prompts that grow turn by turn, all behind the same system prompt.

A turn's prompt is the system prompt, every question and answer before it, and a new question. So all of it
but the question was in the prompts and answers before. The next turn comes when the answer has been read: a
second for every ``READ_TOKENS_PER_S`` tokens of it, and a pause for thinking.

Blocks have ids in place of hashes: the number of a conversation and the place in it. Blocks within the system
prompt have one id in all conversations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.simulation.traces.distributions import exponential
from dynaplan.util.splitmix import uniform_draws

BLOCK_TOKENS = 16
"""The tokens of a block, as engines have them."""

READ_TOKENS_PER_S = 50.0
"""The tokens of an answer that are generated and read in a second."""

PARAMETERS: Mapping[str, float] = {"rate": 1, "turns": 6, "system": 1000, "think": 20, "isl": 200, "osl": 200}
"""The parameters with their defaults: new conversations/s, turns of each on average, tokens of the system
prompt, seconds of thinking on average, and tokens of each question and answer."""

PLACES = 1 << 40
"""The places of blocks in a conversation: more than any has."""


def conversations(
    given: Mapping[str, float], lengths: tuple[Iterator[int], Iterator[int]]
) -> Iterator[TracedRequest]:
    """Yield the turns of all conversations in the order of their arrival; none begins after the duration.

    Conversations begin as a Poisson process. Their numbers of turns are geometrically distributed, and
    pauses exponentially. ``lengths`` are of questions and of answers.
    """
    draws = uniform_draws(int(given["seed"]))
    questions, answers = lengths
    coming: list[tuple[float, int, int]] = []
    begin_s, number = _until_next(draws, given["rate"]), 0
    goes_on = 1 - 1 / max(given["turns"], 1.0)
    while True:
        while begin_s < given["duration"] and (not coming or begin_s <= coming[0][0]):
            number += 1
            heappush(coming, (begin_s, number, int(given["system"])))
            begin_s += _until_next(draws, given["rate"])
        if not coming or coming[0][0] >= given["duration"]:
            return
        at_s, conversation, context = heappop(coming)
        prompt, answer = context + next(questions), next(answers)
        yield TracedRequest(
            at_s, prompt, answer, _blocks(conversation, prompt, int(given["system"])), BLOCK_TOKENS
        )
        after_s = at_s + answer / READ_TOKENS_PER_S + given["think"] * exponential(draws)
        if next(draws) < goes_on:
            heappush(coming, (after_s, conversation, prompt + answer))


def _blocks(conversation: int, prompt_tokens: int, system_tokens: int) -> tuple[int, ...]:
    shared, full = system_tokens // BLOCK_TOKENS, prompt_tokens // BLOCK_TOKENS
    own = conversation * PLACES
    return (*range(min(shared, full)), *range(own + shared, own + full))


def _until_next(draws: Iterator[float], rate: float) -> float:
    """Return the seconds until the next conversation begins; without a rate none ever does."""
    return exponential(draws) / rate if rate else math.inf
