"""Where a prefill goes: the original's vectors, the cases it lacked, and the live settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.routing.disaggregation import (
    PrefillPlace,
    QueueReading,
    place_prefill,
    route_prefill,
    with_live_settings,
)

CONDITIONAL = DisaggregationSettings(is_on=True, is_conditional=True)
ALWAYS = DisaggregationSettings(is_on=True)


@pytest.mark.parametrize(
    ("prompt_tokens", "prefix_hit_rate", "queue_size", "place"),
    [
        (1000, 0.0, 0, PrefillPlace.SHORT),
        (1001, 0.0, 0, PrefillPlace.REMOTE),
        (1001, 0.0, 2, PrefillPlace.QUEUE_FULL),
        (2000, 0.5, 0, PrefillPlace.SHORT),
        (2004, 0.5, 1, PrefillPlace.REMOTE),
    ],
)
def test_the_conditional_decision_is_the_originals(
    prompt_tokens: int, prefix_hit_rate: float, queue_size: int, place: PrefillPlace
) -> None:
    assert place_prefill(CONDITIONAL, prompt_tokens, prefix_hit_rate, queue_size, 1) is place


def test_unconditional_remote_prefill_takes_even_the_shortest_prompt() -> None:
    assert place_prefill(ALWAYS, 1, 0.0, 0, 1) is PrefillPlace.REMOTE


def test_a_full_queue_keeps_the_prefill_local_even_when_unconditional() -> None:
    assert place_prefill(ALWAYS, 5000, 0.0, 2, 1) is PrefillPlace.QUEUE_FULL


@pytest.mark.parametrize(
    ("deadline_ms", "set_tokens", "tokens", "place"),
    [
        (None, None, 1000, PrefillPlace.SHORT),
        (None, None, 1001, PrefillPlace.REMOTE),
        (0.0, None, 1000, PrefillPlace.SHORT),
        (500.0, None, 1, PrefillPlace.REMOTE),
        (500.0, 300, 300, PrefillPlace.SHORT),
    ],
)
def test_by_deadline_no_prompt_is_short_unless_a_length_is_set(
    deadline_ms: float | None, set_tokens: int | None, tokens: int, place: PrefillPlace
) -> None:
    conditional = DisaggregationSettings(True, True, set_tokens, prefill_deadline_ms=deadline_ms)
    assert place_prefill(conditional, tokens, 0.0, 0, 1) is place


def test_by_deadline_no_queue_is_full_unless_a_limit_is_set() -> None:
    by_deadline = replace(ALWAYS, prefill_deadline_ms=500.0)
    assert place_prefill(by_deadline, 5000, 0.0, 10_000, 1) is PrefillPlace.REMOTE
    limited = replace(by_deadline, max_prefill_queue_size=3)
    assert place_prefill(limited, 5000, 0.0, 3, 1) is PrefillPlace.QUEUE_FULL


def test_a_decode_worker_with_more_requests_than_the_limit_computes_no_prompt() -> None:
    settings = with_live_settings(CONDITIONAL, "ns", {"/ns/disagg_router/max_local_running": "3"})
    places = [place_prefill(settings, 10, 0.0, 0, 1, running=running) for running in (3, 4)]
    assert places == [PrefillPlace.SHORT, PrefillPlace.REMOTE]


def test_without_a_prefill_worker_every_prefill_is_local() -> None:
    assert place_prefill(ALWAYS, 5000, 0.0, 0, 0) is PrefillPlace.NO_WORKER


def test_remote_prefill_is_off_unless_asked_for() -> None:
    assert place_prefill(DisaggregationSettings(), 5000, 0.0, 0, 4) is PrefillPlace.OFF


def test_live_keys_replace_the_thresholds() -> None:
    prefix = "/ns/disagg_router/"
    keys = {f"{prefix}max_local_prefill_length": " 10 ", f"{prefix}max_prefill_queue_size": "7"}
    changed = with_live_settings(CONDITIONAL, "ns", keys)
    assert (changed.max_local_prefill_length_tokens, changed.max_prefill_queue_size) == (10, 7)


@pytest.mark.parametrize("text", ["", "ten", "-1", "1.5", "²"])
def test_a_live_value_that_is_not_a_whole_number_changes_nothing(text: str) -> None:
    keys = {"/ns/disagg_router/max_prefill_queue_size": text}
    assert with_live_settings(CONDITIONAL, "ns", keys) == CONDITIONAL


def test_the_queue_is_estimated_from_the_others_at_the_reading_and_the_own_now() -> None:
    assert QueueReading(depth=5, own=3).estimate(own_now=1) == 3
    assert QueueReading(depth=1, own=3).estimate(own_now=0) == 0


def test_a_prompt_is_local_unless_every_prefill_worker_can_hand_over() -> None:
    assert place_prefill(ALWAYS, 5000, 0.0, 0, 2, can_hand_over=False) is PrefillPlace.OUT_OF_REACH
    assert place_prefill(ALWAYS, 5000, 0.0, 0, 0, can_hand_over=False) is PrefillPlace.NO_WORKER


@pytest.mark.parametrize(
    ("overlaps", "waiting", "worker"),
    [
        ({}, {}, None),
        ({1: 5, 2: 8}, {}, 2),
        ({1: 5, 2: 8}, {2: 4}, 1),
        ({1: 5, 2: 8}, {1: 100, 2: 100, 3: 100}, 2),
        ({1: 5}, {1: 100, 2: 96, 3: 100}, 1),
        ({1: 5}, {1: 5}, None),
        ({1: 5}, {1: 90}, None),
        ({2: 8}, {1: 90}, 2),
    ],
)
def test_a_prompt_is_directed_where_its_cache_saves_more_than_the_wait_costs(
    overlaps: dict[int, int], waiting: dict[int, int], worker: int | None
) -> None:
    assert route_prefill((1, 2, 3), overlaps, waiting) == worker
    assert route_prefill((), {}, waiting) is None
