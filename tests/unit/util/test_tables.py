"""Tables and paragraphs as text."""

from __future__ import annotations

import pytest

from dynaplan.util.tables import fold, text_table

ROWS = [("NAME", "SIZE", "AGE"), ("first", "100", "2 days"), ("another", "7", "1 day")]


def test_columns_are_as_wide_as_their_longest_cell_and_lines_end_without_spaces() -> None:
    assert text_table([("NAME", "N"), ("a", "10"), ("longer", "")]) == "NAME    N\na       10\nlonger"


def test_a_table_that_fits_loses_nothing() -> None:
    whole = text_table(ROWS)
    assert text_table(ROWS, width=21, dropping=("AGE",)) == whole
    assert text_table(ROWS, width=0, dropping=("AGE",)) == whole


def test_columns_are_left_out_in_their_order_until_the_table_fits_and_are_named_below() -> None:
    assert text_table(ROWS, width=17, dropping=("SIZE", "AGE")) == (
        "NAME     AGE\nfirst    2 days\nanother  1 day\n(without SIZE,\nwhich --json has)"
    )
    assert text_table(ROWS, width=7, dropping=("GONE", "SIZE", "AGE")).startswith("NAME\nfirst\nanother\n")


@pytest.mark.parametrize("width", range(7, 30))
def test_no_line_of_the_table_is_wider_than_the_screen(width: int) -> None:
    lines = text_table(ROWS, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == len(ROWS)


def test_the_longest_cells_are_cut_when_no_column_may_go() -> None:
    assert text_table(ROWS, width=16).splitlines()[2] == "ano…  7     1 d…"


def test_a_colour_takes_no_room_and_headings_have_none() -> None:
    table = text_table(ROWS, paint={"SIZE": lambda cell: f"<{cell}>"})
    assert table.splitlines()[:2] == ["NAME     SIZE  AGE", "first    <100>   2 days"]


def test_a_paragraph_is_folded_between_words_with_the_indent_and_each_line_by_itself() -> None:
    text = "one two three four\nfive http://127.0.0.1:8000/a/long/address"
    assert fold(text, 9, "  ") == "one two\n  three\n  four\nfive\n  http://127.0.0.1:8000/a/long/address"
    assert fold(text, 0) == text
    assert fold("a\n\nb", 9) == "a\n\nb"
