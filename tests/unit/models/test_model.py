from __future__ import annotations

import pytest

from dynaplan.models.model import LIFECYCLE, LOADED, ModelState, ModelStatus
from dynaplan.util.errors import IllegalTransition


def test_a_model_goes_through_its_lifecycle_and_remembers_it() -> None:
    status = ModelStatus("qwen")
    for second, state in enumerate(
        (ModelState.LOADING, ModelState.READY, ModelState.DRAINING, ModelState.ASLEEP, ModelState.LOADING)
    ):
        status = status.moved(state, float(second), f"step {second}")
    assert status.since_s == 4.0
    assert status.reason == "step 4"
    assert status.history[1] == "1.000 loading -> ready: step 1"
    assert len(status.history) == 5


@pytest.mark.parametrize(
    ("state", "to"), [(a, b) for a in ModelState for b in ModelState if b not in LIFECYCLE[a]]
)
def test_an_illegal_move_raises_with_the_history(state: ModelState, to: ModelState) -> None:
    status = ModelStatus("qwen", state, history=("0.000 earlier",))
    with pytest.raises(IllegalTransition, match=f"qwen: {state.value} -> {to.value}(?s:.*)earlier"):
        status.moved(to, 1.0)


def test_the_history_is_bounded() -> None:
    status = ModelStatus("qwen")
    for _ in range(50):
        status = status.moved(ModelState.LOADING, 0.0).moved(ModelState.UNLOADED, 0.0)
    assert len(status.history) == 16


def test_every_state_leads_to_unloaded_in_the_end() -> None:
    reachable = {ModelState.UNLOADED}
    for _ in ModelState:
        reachable |= {state for state, moves in LIFECYCLE.items() if moves & reachable}
    assert reachable == set(ModelState)
    assert {state for state in ModelState if ModelStatus("x", state).is_loaded} == LOADED
