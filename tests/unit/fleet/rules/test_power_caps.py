"""Which power limits are changed for caps, and to what they come back."""

from __future__ import annotations

import pytest

from dynaplan.contract.gpus import PowerLimit
from dynaplan.fleet.rules.power_caps import CappedLimit, with_cap


def ours(set_watts: float | None, asked_watts: float, earlier_watts: float = 700.0) -> CappedLimit:
    return CappedLimit(earlier_watts, asked_watts, set_watts, {"a": asked_watts})


@pytest.mark.parametrize(
    ("now", "known", "cap", "earlier", "set_now"),
    [
        (700.0, None, 250.0, 700.0, 250.0),
        (250.0, ours(250.0, 250.0), 250.0, 700.0, None),
        (250.0, ours(250.0, 250.0), 300.0, 700.0, 300.0),
        (250.0, ours(250.0, 250.0), None, None, 700.0),
        (700.0, None, None, None, None),
        (700.0, None, 100.0, 700.0, 200.0),
        (250.0, None, 300.0, None, None),
        (250.0, ours(250.0, 250.0, 400.0), 500.0, None, 400.0),
        (600.0, ours(250.0, 250.0), 250.0, 700.0, 250.0),
        (220.0, ours(250.0, 250.0), 250.0, None, None),
        (220.0, ours(250.0, 250.0), None, None, None),
        (330.0, ours(330.0, 333.0), 333.0, 700.0, None),
        (330.0, ours(None, 333.0), 333.0, 700.0, 333.0),
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
        "somebody lowered it meanwhile",
        "somebody lowered it, and the cap has ended",
        "the driver rounds",
        "what the driver made of it is not known",
    ],
)
def test_a_limit_is_lowered_for_a_cap_and_comes_back_to_what_stood_before(
    now: float, known: CappedLimit | None, cap: float | None, earlier: float | None, set_now: float | None
) -> None:
    remembered, watts = with_cap(PowerLimit(now, 200.0), known, "a", cap)
    assert (remembered and remembered.earlier_watts, watts) == (earlier, set_now)


def test_the_least_cap_of_deployments_holds_and_the_last_to_leave_restores() -> None:
    limit, known, seen = 700.0, None, []
    for deployment, cap in (("a", 400.0), ("b", 300.0), ("a", 400.0), ("b", None), ("a", 400.0), ("a", None)):
        known, watts = with_cap(PowerLimit(limit, 200.0), known, deployment, cap)
        limit = watts or limit
        seen.append(limit)
    assert (seen, known) == ([400.0, 300.0, 300.0, 400.0, 400.0, 700.0], None)
