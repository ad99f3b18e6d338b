from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import mean

import pytest

from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.simulation.traces.synthetic import BLOCK_TOKENS, PLACES, synthetic

SYSTEM = 1000
SHARED = SYSTEM // BLOCK_TOKENS
TEXT = f"conversations:rate=2,turns=5,system={SYSTEM},isl=160,osl=320,think=10,duration=400"


def by_conversation(trace: list[TracedRequest]) -> list[list[TracedRequest]]:
    found = defaultdict(list)
    for each in trace:
        found[each.block_hashes[SHARED] // PLACES].append(each)
    return list(found.values())


def test_every_turn_begins_with_the_whole_turn_before_it_and_its_answer() -> None:
    for turns in by_conversation(list(synthetic(TEXT))):
        for before, after in pairwise(turns):
            assert after.prompt_tokens == before.prompt_tokens + 320 + 160
            assert after.block_hashes[: len(before.block_hashes)] == before.block_hashes
            assert after.arrival_s >= before.arrival_s + 320 / 50


def test_conversations_share_the_system_prompt_and_nothing_else() -> None:
    conversations = [
        {block for turn in turns for block in turn.block_hashes}
        for turns in by_conversation(list(synthetic(TEXT)))
    ]
    for one, other in pairwise(conversations):
        assert one & other == set(range(SHARED))


def test_only_full_blocks_have_ids() -> None:
    assert all(len(each.block_hashes) == each.prompt_tokens // BLOCK_TOKENS for each in synthetic(TEXT))


def test_there_are_as_many_conversations_and_turns_as_were_asked_for() -> None:
    text = "conversations:rate=5,turns=4,think=1,osl=10,duration=2000"
    conversations = by_conversation(list(synthetic(text)))
    assert len(conversations) == pytest.approx(10_000, rel=0.05)
    assert mean(map(len, conversations)) == pytest.approx(4, rel=0.05)


def test_without_a_rate_nothing_comes() -> None:
    assert list(synthetic("conversations:rate=0")) == []
