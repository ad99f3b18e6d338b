"""The rows of a comparison, and the notes below it."""

from dynaplan.lab.simulate.table import COLUMNS, columns_of, notes, rows
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.run import Result


def result(policy: str, note: str = "") -> Result:
    return Result(policy, Outcome(Slo(), requests=100, both_met=80), 1.0, 10.0, 10.0, 0, 0, note=note)


def test_a_column_that_no_row_knows_is_left_out() -> None:
    table = rows([result("load")])

    assert list(columns_of(table)) == [key for key in COLUMNS if key != "hit_rate"]


def test_a_note_stands_in_its_row_and_below_the_table() -> None:
    results = [result("load"), result("best-static:1,1", "It keeps the promise.")]
    load, best = rows(results)

    assert "note" not in load
    assert best["note"] == "It keeps the promise."
    assert notes(results) == ["It keeps the promise."]
