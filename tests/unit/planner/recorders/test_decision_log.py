"""What the planner writes down can be read back, and never stops it."""

from __future__ import annotations

import json
import logging
import resource
import signal
import warnings
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import Sample
from dynaplan.planner.model import Corrections, DecisionRecord, PlannerState
from dynaplan.planner.recorders import tensorboard
from dynaplan.planner.recorders.decision_log import (
    JsonLinesRecorder,
    all_recent_records,
    read_all,
    read_records,
    recent_records,
    write_pointer,
)
from dynaplan.planner.recorders.tensorboard import TensorBoardRecorder
from dynaplan.planner.rules.decision import decide
from tests.unit.planner.rules.situations import interval


def record(at_s: float = 30.0, kv: float | None = 0.95) -> DecisionRecord:
    settings, state, observation = PlannerSettings(), PlannerState(), interval(1, 1, kv, (1, 2), at_s)
    next_state, decision = decide(settings, state, observation)
    return DecisionRecord(
        f"2026-01-01T00:00:{at_s:02.0f}+00:00", settings, state, observation, decision, next_state
    )


def write_lines(log_dir: Path, *records: DecisionRecord) -> None:
    recorder = JsonLinesRecorder(log_dir)
    for each in records:
        recorder.record_decision(each)
    recorder.close()


@contextmanager
def a_full_disk(size: int = 0):
    """Files may not grow beyond that size: writes fail half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_is_the_record(tmp_path):
    write_lines(tmp_path, record())
    (document,) = read_records(tmp_path, 5)
    assert DecisionRecord.from_json(document) == record()
    assert len(document["fingerprint"]) == 12


def test_the_last_records_come_oldest_first(tmp_path):
    write_lines(tmp_path, *(record(at_s) for at_s in (10, 20, 30)))
    assert [each["observation"]["at_s"] for each in read_records(tmp_path, 2)] == [20, 30]


def following(before: DecisionRecord, at_s: float) -> DecisionRecord:
    """The next record of the same planner, with a memory of its own."""
    after = replace(before.next_state, corrections=Corrections(1.0, at_s))
    return replace(record(at_s), state=before.next_state, next_state=after)


def test_a_memory_that_the_line_before_has_is_not_written_again_and_is_read_with_every_record(tmp_path):
    records = [record(0)]
    for at_s in (30, 40, 50):
        records.append(following(records[-1], at_s))
    write_lines(tmp_path, *records[:3])
    write_lines(tmp_path, records[3])
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines() if line]
    assert ["state" in line for line in lines] == [True, False, False, True]
    for last in (1, 2, 4, 5):
        read = [DecisionRecord.from_json(document) for document in read_records(tmp_path, last)]
        assert read == records[-last:]
    every = [DecisionRecord.from_json(document) for _, document in read_all(tmp_path / "decisions.jsonl")]
    assert every == records


def test_a_record_whose_memory_is_beyond_what_is_looked_through_is_left_out(tmp_path):
    first = record(0)
    write_lines(tmp_path, first, following(first, 30), following(following(first, 30), 40))
    size = (tmp_path / "decisions.jsonl").stat().st_size
    assert len(read_records(tmp_path, 3, size)) == 3
    assert read_records(tmp_path, 3, size - 10) == []


def test_settings_are_written_with_every_twentieth_line_and_when_they_change_and_read_with_each(tmp_path):
    records = [record(0)]
    while len(records) < 45:
        records.append(following(records[-1], len(records)))
    other = replace(records[30], settings=PlannerSettings(max_gpu_budget=4))
    records[30] = other
    write_lines(tmp_path, *records)
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines() if line]
    assert [number for number, line in enumerate(lines) if "settings" in line] == [0, 20, 30, 31]
    for last in (1, 3, 16, 45):
        read = [DecisionRecord.from_json(document) for document in read_records(tmp_path, last)]
        assert read == records[-last:]


def test_after_a_line_that_was_not_written_the_memory_is(tmp_path):
    first = record(0)
    recorder = JsonLinesRecorder(tmp_path)
    with a_full_disk():
        recorder.record_decision(first)
    recorder.record_decision(following(first, 30))
    recorder.close()
    assert [DecisionRecord.from_json(each) for each in read_records(tmp_path, 2)] == [following(first, 30)]


def test_torn_lines_are_left_out(tmp_path):
    write_lines(tmp_path, record(10))
    with (tmp_path / "decisions.jsonl").open("a") as file:
        file.write('{"torn": ')
    write_lines(tmp_path, record(20))
    assert [each["observation"]["at_s"] for each in read_records(tmp_path, 5)] == [10, 20]


def test_the_records_of_the_planner_before_fill_up(tmp_path):
    write_lines(tmp_path / "20260101_000000", record(10), record(20))
    write_lines(tmp_path / "elsewhere" / "deep", record(30))
    write_pointer(tmp_path, tmp_path / "elsewhere" / "deep")
    assert [each["observation"]["at_s"] for each in recent_records(tmp_path, 2)] == [20, 30]
    assert [each["observation"]["at_s"] for each in recent_records(tmp_path, 1)] == [30]


def test_records_of_an_earlier_deployment_are_left_out(tmp_path):
    write_lines(tmp_path / "20260101_000000", record(10), record(20))
    began_s = datetime(2026, 1, 1, 0, 0, 15, tzinfo=UTC).timestamp()
    assert [each["observation"]["at_s"] for each in recent_records(tmp_path, 5, since_s=began_s)] == [20]
    assert recent_records(tmp_path, 5, since_s=began_s + 60) == []


def test_records_of_several_planners_are_in_the_order_of_their_moments_whatever_the_offset(tmp_path):
    hours = {"": "2026-10-25T02:00:15+01:00", "a": "2026-10-25T02:59:45+02:00", "b": "soon"}
    for name, wall_time in hours.items():
        write_lines(tmp_path / name / "run", replace(record(), wall_time=wall_time))
        write_pointer(tmp_path / name, tmp_path / name / "run")
    assert [each["wall_time"] for each in all_recent_records(tmp_path, 3)] == [
        hours["b"],
        hours["a"],
        hours[""],
    ]


def test_nothing_written_is_no_records(tmp_path):
    (tmp_path / "decisions.jsonl").touch()
    assert read_records(tmp_path, 5) == []
    assert recent_records(tmp_path / "nowhere", 5) == []


def test_a_full_disk_is_logged_once_and_what_comes_later_is_whole(tmp_path, caplog):
    recorder = JsonLinesRecorder(tmp_path)
    recorder.record_decision(record(10))
    size = (tmp_path / "decisions.jsonl").stat().st_size
    with caplog.at_level(logging.WARNING), a_full_disk(size + 100):
        recorder.record_decision(record(20))
        recorder.record_decision(record(30))
    recorder.record_decision(record(40))
    recorder.close()
    assert len(caplog.records) == 1
    assert [each["observation"]["at_s"] for each in read_records(tmp_path, 5)] == [10, 40]


def test_a_directory_that_cannot_be_made_does_not_stop_the_planner(tmp_path, caplog):
    (tmp_path / "file").touch()
    for recorder in (
        JsonLinesRecorder(tmp_path / "file" / "logs"),
        TensorBoardRecorder(tmp_path / "file" / "logs", PlannerSettings()),
    ):
        recorder.record_decision(record())
        recorder.record_sample(Sample(1.0))
        recorder.close()
    assert len(caplog.records) == 2


def test_crc32c_is_castagnolis():
    assert tensorboard.crc32c(b"123456789") == 0xE3069283


def read_with_tensorboard(log_dir: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0})
        events.Reload()
        return {
            tag: [(each.step, round(each.value, 4)) for each in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }


def test_tensorboard_reads_the_originals_tags_and_the_decisions(tmp_path):
    recorder = TensorBoardRecorder(tmp_path, PlannerSettings(decode_engine_num_gpu=2))
    for second in range(300):
        recorder.record_sample(Sample(100.0 + second, 0.25, "", 3.0, "", 7, 1, 2))
    recorder.record_sample(Sample(400.0, None, "nobody answered", 0.0, "", 0, 1, 2))
    recorder.record_decision(record(400.5))
    recorder.close()
    read = read_with_tensorboard(tmp_path)
    assert read["average_kv_load"] == [(second, 0.25) for second in range(300)]
    assert read["prefill_queue_size"] == [(second, 3.0) for second in range(300)] + [(300, 0.0)]
    assert read["total_queued_requests"][0] == (0, 7.0)
    assert read["num_prefill_workers"][0] == (0, 1.0)
    assert read["num_decode_workers"][0] == (0, 2.0)
    assert read["num_gpu"][0] == (0, 5.0)
    assert read["desired_prefill_workers"] == [(300, 2.0)]
    assert read["desired_decode_workers"] == [(300, 2.0)]
    assert read["decode_grace_left"] == [(300, 3.0)]


@pytest.mark.parametrize("size", [0, 40])
def test_tensorboard_reads_what_was_written_after_the_disk_was_full(tmp_path, size):
    recorder = TensorBoardRecorder(tmp_path, PlannerSettings())
    with a_full_disk(size):
        recorder.record_sample(Sample(1.0, 0.5))
    recorder.record_sample(Sample(2.0, 0.75))
    recorder.close()
    newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    assert read_with_tensorboard(newest)["average_kv_load"] == [(1, 0.75)]


def test_a_line_holds_json_only(tmp_path):
    write_lines(tmp_path, record(kv=None))
    for line in (tmp_path / "decisions.jsonl").read_text().splitlines():
        assert "NaN" not in line
        json.loads(line)
