"""The deadline of queued prompts: said, or else the target of the Planner in the same configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dynaplan.config.deadline import PrefillDeadline, prefill_deadline
from dynaplan.config.settings.routing import DisaggregationSettings
from dynaplan.util.errors import ConfigError

ON = DisaggregationSettings(is_on=True)


@pytest.mark.parametrize(
    ("planner", "deadline"),
    [
        ({}, PrefillDeadline()),
        ({"ttft": 300}, PrefillDeadline()),
        ({"policy": "load", "ttft": 300}, PrefillDeadline()),
        ({"policy": "sla"}, PrefillDeadline(500.0, "Planner.ttft")),
        ({"policy": "both", "ttft": 300}, PrefillDeadline(300.0, "Planner.ttft")),
        ({"policy": "sla", "prefill_deadline": 0}, PrefillDeadline(0.0, "Planner.prefill-deadline")),
        ({"prefill-deadline": 700}, PrefillDeadline(700.0, "Planner.prefill-deadline")),
        ({"policy": "sla", "an option of tomorrow": 1}, PrefillDeadline(500.0, "Planner.ttft")),
    ],
)
def test_a_planner_that_plans_for_targets_says_the_deadline(
    planner: Mapping[str, Any], deadline: PrefillDeadline
) -> None:
    assert prefill_deadline(ON, planner) == deadline


@pytest.mark.parametrize("ms", [0.0, 800.0])
def test_what_a_frontend_is_told_comes_first_and_zero_is_off(ms: float) -> None:
    said = DisaggregationSettings(is_on=True, prefill_deadline_ms=ms)
    assert prefill_deadline(said, {"policy": "sla"}) == PrefillDeadline(ms, "prefill-deadline")


def test_without_prefill_workers_nothing_is_queued() -> None:
    assert prefill_deadline(DisaggregationSettings(), {"policy": "sla"}) == PrefillDeadline()


def test_a_wrong_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="ttft"):
        prefill_deadline(ON, {"policy": "sla", "ttft": "soon"})


def test_it_is_told_in_words_with_its_origin() -> None:
    assert str(PrefillDeadline(500.0, "Planner.ttft")) == "by deadline, 500 ms (Planner.ttft)"
    assert str(PrefillDeadline(0.0, "prefill-deadline")) == "in the order of arrival"
