"""Which power limits are changed for a cap, and to what they come back."""

from __future__ import annotations

import pytest

from dynaplan.contract.gpus import PowerLimit
from dynaplan.fleet.rules.power_caps import capped


@pytest.mark.parametrize(
    ("now", "before", "cap", "remembered", "set_now"),
    [
        (700.0, {}, 250.0, {0: 700.0}, {0: 250.0}),
        (250.0, {0: 700.0}, 250.0, {0: 700.0}, {}),
        (250.0, {0: 700.0}, 300.0, {0: 700.0}, {0: 300.0}),
        (250.0, {0: 700.0}, None, {}, {0: 700.0}),
        (700.0, {}, None, {}, {}),
        (700.0, {}, 100.0, {0: 700.0}, {0: 200.0}),
        (250.0, {}, 300.0, {}, {}),
        (250.0, {0: 400.0}, 500.0, {}, {0: 400.0}),
        (600.0, {0: 700.0}, 250.0, {0: 700.0}, {0: 250.0}),
    ],
    ids=[
        "a cap begins",
        "it holds",
        "another cap holds now",
        "none holds any more",
        "there was none",
        "a cap below the least is the least",
        "a limit that is lower already stays",
        "a cap above what stood before ends ours",
        "somebody raised it meanwhile",
    ],
)
def test_a_limit_is_lowered_for_a_cap_and_comes_back_to_what_stood_before(
    now: float,
    before: dict[int, float],
    cap: float | None,
    remembered: dict[int, float],
    set_now: dict[int, float],
) -> None:
    assert capped({0: PowerLimit(now, 200.0)}, before, cap) == (remembered, set_now)
