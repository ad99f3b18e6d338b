"""One bad request among good ones is found within few deaths, and no good one is ever refused for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.gateway.suspects import (
    FORGET_S,
    MOST_REMEMBERED,
    TRY_AGAIN_S,
    Fingerprint,
    Suspects,
    Suspicion,
    fingerprint,
)

POISON = {"model": "m", "prompt": "hi", "grammar_triggers": [{"type": 99, "value": "x"}]}
GOOD = {"model": "m", "prompt": "Why is the sky blue?", "max_tokens": 8}


def of(document: dict[str, Any], **changes: Any) -> Fingerprint:
    changed = document | changes
    return fingerprint(json.dumps(changed).encode(), changed)


def test_a_request_alone_at_a_death_is_suspected_and_convicted_by_the_next() -> None:
    suspects = Suspects()
    assert suspects.verdict(of(POISON), 0) is Suspicion.CLEAR
    suspects.died([of(POISON)], 0)
    assert suspects.verdict(of(POISON), 1) is Suspicion.SUSPECTED
    suspects.died([of(POISON), of(GOOD)], 1)
    assert suspects.verdict(of(POISON), 2) is Suspicion.CONVICTED
    assert suspects.verdict(of(GOOD), 2) is Suspicion.CLEAR


def test_requests_at_two_deaths_are_suspected_and_one_answer_clears() -> None:
    suspects = Suspects()
    for now_s in (0, 1):
        suspects.died([of(POISON), of(GOOD)], now_s)
    assert suspects.verdict(of(GOOD), 2) is Suspicion.SUSPECTED
    suspects.answered(of(GOOD), 2)
    assert suspects.verdict(of(GOOD), 3) is Suspicion.CLEAR
    assert suspects.verdict(of(POISON), 3) is Suspicion.SUSPECTED


def test_two_suspects_of_one_death_convict_neither() -> None:
    suspects = Suspects()
    for now_s in range(5):
        suspects.died([of(POISON), of(GOOD)], now_s)
    assert suspects.verdict(of(POISON), 5) is suspects.verdict(of(GOOD), 5) is Suspicion.SUSPECTED


def test_a_shape_is_convicted_by_two_bodies_and_then_refuses_a_third_at_once() -> None:
    suspects = Suspects()
    suspects.died([of(POISON)], 0)
    suspects.died([of(POISON)], 1)
    assert suspects.verdict(of(POISON, prompt="ho"), 2) is Suspicion.SUSPECTED
    suspects.died([of(POISON, prompt="ho")], 2)
    assert suspects.verdict(of(POISON, prompt="never seen"), 3) is Suspicion.CONVICTED


def test_a_shape_that_was_answered_is_never_convicted_however_many_bodies_kill() -> None:
    suspects = Suspects()
    suspects.answered(of(GOOD), 0)
    for number in range(10):
        killer = of(GOOD, prompt=f"killer {number}")
        suspects.died([killer], number)
        suspects.died([killer], number)
        assert suspects.verdict(killer, number) is Suspicion.CONVICTED
    assert suspects.verdict(of(GOOD, prompt="an innocent one"), 10) is Suspicion.CLEAR


def test_evidence_is_forgotten_and_bounded() -> None:
    suspects = Suspects()
    for number in range(2 * MOST_REMEMBERED):
        suspects.died([of(POISON, prompt=str(number))] * 2, 0)
    assert len(suspects._exact) == MOST_REMEMBERED
    suspects.died([of(GOOD)], 0)
    assert suspects.verdict(of(GOOD), FORGET_S) is Suspicion.SUSPECTED
    assert suspects.verdict(of(GOOD), FORGET_S + 1) is Suspicion.CLEAR


def test_it_is_quiet_before_the_first_death_and_when_the_last_one_is_forgotten() -> None:
    suspects = Suspects()
    assert suspects.is_quiet(0)
    suspects.died([of(GOOD)], 0)
    assert not suspects.is_quiet(FORGET_S)
    assert suspects.is_quiet(FORGET_S + 1)


def test_a_body_that_is_answered_in_between_does_not_collect_deaths() -> None:
    suspects = Suspects()
    for now_s in range(10):
        suspects.died([of(GOOD)] * 3, now_s)
        assert suspects.verdict(of(GOOD), now_s) is Suspicion.CLEAR
        suspects.answered(of(GOOD), now_s)


def test_equal_requests_at_one_death_convict_nobody() -> None:
    suspects = Suspects()
    for now_s in range(5):
        suspects.died([of(GOOD), of(GOOD)], now_s)
    assert suspects.verdict(of(GOOD), 5) is Suspicion.SUSPECTED


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({"prompt": "another text"}, True),
        ({"max_tokens": 9}, False),
        ({"top_k": 3}, False),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, False),
    ],
)
def test_a_shape_holds_names_and_numbers_and_no_text(other: dict[str, Any], is_same: bool) -> None:
    assert (of(GOOD).shape == of(GOOD, **other).shape) is is_same


def test_conversations_of_different_length_have_one_shape() -> None:
    turns = [[{"role": "user", "content": "x" * number}] * number for number in (1, 2, 9)]
    assert len({of({"model": "m", "messages": messages}).shape for messages in turns}) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=8), json_values, max_size=8))
def test_any_request_has_a_fingerprint(document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    assert fingerprint(body, document) == fingerprint(body, json.loads(body))


def test_a_deeply_nested_request_has_a_fingerprint() -> None:
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    assert of({"model": "m", "x": nested}) != of({"model": "m", "x": [[]]})


def test_the_deaths_of_a_suspect_are_forgiven_from_the_second_on_and_those_of_an_unknown_are_not() -> None:
    suspects = Suspects()
    assert suspects.died([of(POISON), of(GOOD)], 0, 1) == frozenset()
    assert suspects.died([of(POISON), of(GOOD, prompt="another")], 1, 2) == frozenset()
    assert suspects.died([of(POISON)], 2, 3) == {1, 2, 3}


def test_of_requests_that_ended_without_an_answer_only_one_that_was_alone_is_to_blame() -> None:
    suspects = Suspects()
    suspects.died([of(POISON)], 0, 1)
    suspects.died([of(GOOD), of(GOOD, prompt="another")], 0, 2)
    assert suspects.unanswered(of(POISON), 1) == {1}
    assert suspects.unanswered(of(GOOD), 1) == suspects.unanswered(of(GOOD, prompt="x"), 1) == frozenset()


def test_while_no_worker_begins_an_answer_one_convicted_request_is_tried_now_and_then() -> None:
    """A lone broken worker dies over every request; once it is mended, the same request is answered."""
    suspects = Suspects()
    assert not suspects.are_workers_doubtful()
    for now_s in (0.0, 1.0):
        suspects.died([of(GOOD)], now_s)
    assert suspects.are_workers_doubtful()
    assert suspects.verdict(of(GOOD), TRY_AGAIN_S) is Suspicion.CONVICTED
    assert suspects.verdict(of(GOOD), 1.0 + TRY_AGAIN_S) is Suspicion.SUSPECTED
    suspects.died([of(GOOD)], 1.0 + TRY_AGAIN_S)
    assert suspects.verdict(of(GOOD), 2.0 + TRY_AGAIN_S) is Suspicion.CONVICTED
    suspects.answered(of(GOOD), 100.0)
    assert not suspects.are_workers_doubtful()
    assert suspects.verdict(of(GOOD), 100.0) is Suspicion.CLEAR


def test_once_another_request_is_answered_a_convicted_one_is_not_tried_again() -> None:
    suspects = Suspects()
    for now_s in (0.0, 1.0):
        suspects.died([of(POISON)], now_s)
    suspects.answering()
    assert suspects.verdict(of(POISON), 5 * TRY_AGAIN_S) is Suspicion.CONVICTED
