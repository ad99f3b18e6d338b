"""The tables of options in the guide."""

from __future__ import annotations

from pathlib import Path

from dynaplan.config.settings.fields import NO_EFFECT
from dynaplan.config.stock import FRONTEND, PLANNER, WORKER
from tests.option_tables import GUIDE, PLACE, TABLES, main, with_tables


def test_the_tables_of_the_guide_are_current() -> None:
    text = GUIDE.read_text()
    assert text == with_tables(text), "python -m tests.option_tables"
    assert {place[2] for place in PLACE.finditer(text)} == set(TABLES)


def test_every_option_that_has_an_effect_is_in_a_table() -> None:
    text = GUIDE.read_text()
    known = {**WORKER, **FRONTEND, **PLANNER}
    explained = {
        name for name, each in known.items() if not each.about.startswith(("An option of", NO_EFFECT))
    }
    assert {name for name in explained if f"| `{name}` |" not in text} == set()


def test_a_table_takes_the_place_of_an_older_one_and_leaves_the_rest(tmp_path: Path) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text("before\n<!-- options: simulated -->\nold\n<!-- end of options -->\nafter\n")
    main(guide)
    lines = guide.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert "| `speedup-ratio` | 1 | Divides every simulated duration; 0 means no delay at all |" in lines
