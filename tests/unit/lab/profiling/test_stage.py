"""Which points of a stage are measured when there is a journal of the last time.

What was measured is not measured again.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from dynaplan.lab.profiling import stage as stages
from dynaplan.lab.profiling.load_points import DecodeLoad
from dynaplan.lab.profiling.measured_config import Phase
from dynaplan.lab.profiling.measured_deployment import EngineFacts, MeasurementPlan
from dynaplan.lab.profiling.measurements import DecodeMeasurement
from dynaplan.lab.profiling.stage import JOURNAL_FILE, Journal, Stage, fingerprint, run_stage
from dynaplan.util.errors import ConfigError

LOAD = DecodeLoad(200, 200, 1)
FACTS = EngineFacts("m", context_tokens=4096, max_kv_tokens=40_000, request_slots=64)
MEASURED = asdict(DecodeMeasurement(200, 200, 1, itl_ms=5.0, output_tokens_per_s=200.0))


class Started(Exception):
    """A deployment would have been started."""


class NoDeployment:
    """In the place of one: nobody may start it who has nothing to measure."""

    def __init__(self, plan: MeasurementPlan) -> None:
        pass

    async def __aenter__(self) -> NoDeployment:
        raise Started

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...


class Quiet:
    """Says nothing."""

    def report(self, line: str) -> None: ...

    def stage(self, label: str, points: int) -> Any: ...


def run(directory: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MeasuredDeployment", NoDeployment)
    plan = MeasurementPlan("graphs.agg:Frontend", directory / "graph.yaml", directory, None, 10.0)
    stage = Stage(Phase.DECODE, 1, {"VllmWorker": {"engine": "sim"}}, "a", plan)
    journal = Journal(directory)
    journal.add(stage.key(engine=True), asdict(FACTS))
    journal.add(stage.key(**LOAD._asdict()), values)
    asyncio.run(run_stage(stage, lambda _: [LOAD], journal, Quiet()))


def test_a_point_that_could_not_be_measured_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Started):
        run(tmp_path, {}, monkeypatch)


def test_a_stage_whose_points_are_all_known_does_not_raise_as_it_would_for_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, MEASURED, monkeypatch)


KEY = {"kind": "prefill", "isl_tokens": 100, "fingerprint": "a"}
VALUES = {"isl_tokens": 100, "ttft_ms": 12.5}


def test_the_next_run_finds_what_was_written_down(tmp_path: Path) -> None:
    Journal(tmp_path).add(KEY, VALUES)
    assert Journal(tmp_path).find(KEY) == VALUES


def test_another_configuration_finds_nothing(tmp_path: Path) -> None:
    Journal(tmp_path).add(KEY, VALUES)
    assert Journal(tmp_path).find({**KEY, "fingerprint": "b"}) is None


def test_a_line_that_was_cut_off_is_measured_anew_and_costs_no_other(tmp_path: Path) -> None:
    Journal(tmp_path).add(KEY, VALUES)
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write('{"key": {"kind": "pre')
    other = {**KEY, "isl_tokens": 200}
    journal = Journal(tmp_path)
    assert journal.find(KEY) == VALUES
    journal.add(other, VALUES)
    assert Journal(tmp_path).find(other) == VALUES


def test_a_file_that_is_none_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).mkdir()
    with pytest.raises(ConfigError, match=JOURNAL_FILE):
        Journal(tmp_path)


def test_a_fingerprint_is_of_the_values_not_of_their_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
