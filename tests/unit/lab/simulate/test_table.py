"""The rows of a comparison, and the oracle's verdict in fields and in words."""

from dynaplan.lab.simulate.run import Result, Verdict
from dynaplan.lab.simulate.table import COLUMNS, columns_of, notes, rows
from dynaplan.simulation.outcome import Outcome, Slo


def result(policy: str, gpu_hours: float, verdict: Verdict | None = None) -> Result:
    outcome = Outcome(Slo(), requests=100, both_met=80)
    return Result(policy, outcome, gpu_hours, 10.0, 10.0, 0, 0, verdict=verdict)


PREFIXLESS = [key for key in COLUMNS if key != "hit_rate"]
"""The columns for a trace that tells no prefixes."""

MET = Verdict(95.0, is_slo_met=True, lower_bound_gpu_hours=0.25)


def test_without_the_oracle_nothing_is_compared_and_nothing_noted() -> None:
    table = rows([result("load", 1.0)])

    assert list(columns_of(table)) == [key for key in PREFIXLESS if "oracle" not in key]
    assert notes([result("load", 1.0)]) == []


def test_every_row_is_compared_with_the_oracles() -> None:
    table = rows([result("load", 1.0), result("oracle", 0.5, MET)])

    assert list(columns_of(table)) == PREFIXLESS
    assert [row["gpu_hours_of_oracle"] for row in table] == [2.0, 1.0]


def test_a_share_of_the_oracles_attainment_stands_beside_both_attainments() -> None:
    table = rows([result("load", 1.0), result("oracle", 0.5, MET)])

    keys = list(columns_of(table))
    assert keys[keys.index("slo") :][:3] == ["slo", "oracle_slo", "slo_of_oracle"]
    assert [(row["slo"], row["oracle_slo"], row["slo_of_oracle"]) for row in table] == [(0.8, 0.8, 1.0)] * 2


def test_the_oracles_row_says_whether_it_meets_the_slo_and_what_the_least_is() -> None:
    load, oracle = rows([result("load", 1.0), result("oracle", 0.5, MET)])

    assert (oracle["is_slo_met"], oracle["lower_bound_gpu_hours"]) == (True, 0.25)
    assert "no_lower_bound" not in oracle
    assert "lower_bound_gpu_hours" not in load


def test_a_note_tells_the_verdict_in_words() -> None:
    (note,) = notes([result("load", 1.0), result("oracle", 0.5, MET)])

    assert note.startswith("oracle: meets the SLO (each target by 95 % of the requests).")
    assert "80.0% meet both targets" in note
    assert "at least 0.250 GPU-hours" in note


def test_a_note_says_when_no_schedule_meets_the_slo() -> None:
    (note,) = notes([result("oracle", 0.5, Verdict(95.0, False, 0.25))])

    assert "no schedule that was simulated meets the SLO" in note


def test_without_a_lower_bound_the_reason_is_said_instead() -> None:
    verdict = Verdict(95.0, True, None, "prompts share prefixes")
    (row,) = rows([result("oracle", 0.5, verdict)])
    (note,) = notes([result("oracle", 0.5, verdict)])

    assert row["lower_bound_gpu_hours"] is None
    assert row["no_lower_bound"] == "prompts share prefixes"
    assert note.endswith("No lower bound: prompts share prefixes.")
