"""What commands show, whole and as a person reads it: tests/fixtures/pages."""

from __future__ import annotations

import difflib

import pytest

from tests.unit.cli import golden


@pytest.mark.parametrize("name", golden.PAGES)
def test_a_page_reads_as_the_kept_one(name: str) -> None:
    kept, now = (text.splitlines() for text in (golden.kept(name), golden.page(name)))
    changed = "\n".join(difflib.unified_diff(kept, now, "kept", "now", lineterm=""))
    assert not changed, f"If that is meant: `{golden.RENEWED_BY}`, and say in the commit why.\n{changed}"


def test_every_kept_page_is_compared() -> None:
    assert {file.stem for file in golden.DIRECTORY.iterdir()} == set(golden.PAGES)
