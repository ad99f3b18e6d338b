"""What a measurement says beside its numbers."""

from __future__ import annotations

from typing import Any

from dynaplan.cli.bench.command import notes, table
from dynaplan.cli.bench.measurement import Measured, Tally
from dynaplan.cli.simulate import text_table
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.profiling.load.completions import Answer, AnswerStream, RequestFailed
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.run import Result


def measured(**changes: Any) -> Measured:
    tally = Tally(Slo(500.0, 50.0), 0.0)
    tally.answered(AnswerStream(), 1.0, Answer(1.0, (1.2, 2.2), 30, 101), TracedRequest(0.0, 30, 101))
    return Measured(tally, "m", 10.0, **{"client_load": 0.1, "is_interrupted": False, **changes})


def test_the_measured_row_stands_above_the_simulated_one_and_leaves_out_what_nobody_saw() -> None:
    predicted = Result("load", Outcome(Slo(), requests=3, both_met=3), 0.5, 10.0, 10.0, 2, 0)
    rows = table(measured(), None, predicted)
    assert [row["policy"] for row in rows] == ["measured", "simulated"]
    assert rows[1]["simulated_policy"] == "load"
    assert (rows[0]["gpu_hours"], rows[0]["hit_rate"]) == (None, None)
    lines = text_table(rows).splitlines()
    assert "GPU-HOURS" in lines[0]
    assert " - " in lines[1]
    assert " - " not in lines[2]


def test_nothing_is_noted_of_a_measurement_in_order() -> None:
    assert list(notes(measured(), (30, 101))) == []


def test_failures_other_lengths_and_a_busy_client_are_noted() -> None:
    busy = measured(client_load=0.9)
    busy.tally.failed(AnswerStream(), RequestFailed("503 no_worker", "none is there"))
    busy.tally.open.add(AnswerStream())
    busy.tally.other_answers = busy.tally.other_prompts = 2
    busy.tally.late_s = 0.5
    lines = list(notes(busy, (30, 101)))
    assert lines[0] == "failed: 1 x 503 no_worker: none is there"
    assert [
        next(word for word in ("open", "answers", "prompts", "core", "500 ms") if word in each)
        for each in lines[1:]
    ] == ["open", "answers", "prompts", "core", "500 ms"]
