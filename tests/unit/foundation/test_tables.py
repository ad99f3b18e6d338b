"""Tables as text."""

from __future__ import annotations

from dynaplan.foundation.tables import text_table


def test_columns_are_as_wide_as_their_longest_cell_and_lines_end_without_spaces() -> None:
    assert text_table([("NAME", "N"), ("a", "10"), ("longer", "")]) == "NAME    N\na       10\nlonger"
