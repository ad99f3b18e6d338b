"""The whole trail of decisions of a few short simulations is as it was: a change must explain itself."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from tests.unit.planner.rules import golden


@pytest.mark.parametrize("name", golden.SCENARIOS)
def test_every_decision_of_the_trail_is_the_kept_one(name: str) -> None:
    kept = golden.fixture(name).read_text(encoding="utf-8").splitlines()
    differences = changes(kept, golden.trail(golden.SCENARIOS[name]))
    assert not differences, f"""
{len(differences)} decisions of {name} are not those kept in {golden.fixture(name).name}:

{chr(10).join(differences)}

If that is meant: run `{golden.REGENERATE}`, read the difference, and say in the commit why they changed.
"""


def test_every_kept_trail_is_compared() -> None:
    assert {each.stem for each in golden.FOLDER.iterdir()} == set(golden.SCENARIOS)


def test_a_difference_tells_which_decisions_changed() -> None:
    kept = ["10 s: a", "20 s: b"]
    assert changes(kept, kept) == []
    assert changes(kept, ["10 s: a", "20 s: c", "30 s: d"]) == [
        "  kept 20 s: b\n  now  20 s: c",
        "  kept (no decision)\n  now  30 s: d",
    ]


def changes(kept: list[str], now: list[str]) -> list[str]:
    """The lines that differ, in pairs."""
    pairs = zip_longest(kept, now, fillvalue="(no decision)")
    return [f"  kept {old}\n  now  {new}" for old, new in pairs if old != new]
