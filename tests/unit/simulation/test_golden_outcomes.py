"""Short simulations of every kind come to what they came to: a change must explain itself."""

from __future__ import annotations

import json

import pytest

from tests.unit.simulation import golden


@pytest.mark.parametrize("name", golden.RUNS)
def test_a_simulation_comes_to_the_kept_outcome(name: str) -> None:
    kept, now = golden.kept()[name], json.loads(json.dumps(golden.outcome(golden.RUNS[name])))
    changed = {key: (kept.get(key), now[key]) for key in now if kept.get(key) != now[key]}
    assert not changed, f"""
{name} came to something else than the fixture {golden.FIXTURE.name} has (kept, now): {changed}

If that is meant: run `{golden.REGENERATE}`, read the difference, and say in the commit why it is so.
"""


def test_every_kept_outcome_is_compared() -> None:
    assert set(golden.kept()) == set(golden.RUNS)
