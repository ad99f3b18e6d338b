"""How long a demand waits for the turn of another model to end."""

from __future__ import annotations

import pytest

from dynaplan.models.model import Learnt, ModelPolicy, ModelStatus
from dynaplan.models.rules.turns import max_swap_wait_s


@pytest.mark.parametrize(
    ("wanted_s", "timeout_s", "expected_s"),
    [(None, 600.0, 30.0), (None, 25.0, 15.0), (100.0, 60.0, 50.0), (100.0, 5.0, 0.0), (7.0, 60.0, 7.0)],
)
def test_a_wait_for_a_turn_leaves_the_time_of_a_load_before_the_requests_are_refused(
    wanted_s: float | None, timeout_s: float, expected_s: float
) -> None:
    settings = ModelPolicy(max_swap_wait_s=wanted_s, load_timeout_s=timeout_s)
    assert max_swap_wait_s(settings, ModelStatus("a", learnt=Learnt(load_s=10.0))) == expected_s
