"""From the workers' loads to what a decision is made by, and from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.engines.engine_counters import EngineCounters
from dynaplan.engines.machine_speed import Machine, prior_line
from dynaplan.engines.model_memory import MemoryNeed
from dynaplan.engines.timing_model.learnt_timing import UNKNOWN_MACHINE, LearntTiming, StepLearner
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.planner import learnt_files
from dynaplan.planner.learnt_files import LearntOf, learnt_of, list_files, read_file, write_file
from dynaplan.planner.sla_model import build_sla_model, has_profile
from dynaplan.planner.step_learning import RoleLearning, StepLearning

BOX = Machine("a box", 1e12, has_gpu=True)
STEP_MS = 20.0


def of(**options: object) -> LearntOf:
    config = {"Worker": {"engine": "llamacpp", "model": "tiny.gguf", **options}}
    return learnt_of(config, "Worker", BOX, 1, "decode")


def load(second: int) -> WorkerLoad:
    """The load of a worker whose steps each decode 4 sequences in 20 ms."""
    steps = second * 1000 / STEP_MS
    counters = EngineCounters(second, steps, 4 * steps, 10.0, 1.0, second, 4000.0, 32_000.0)
    return WorkerLoad(running_requests=4, request_slots=8, counters=counters)


def learning(directory: Path | None, *, is_needed: bool = True) -> StepLearning:
    decode = RoleLearning(StepLearner(UNKNOWN_MACHINE), of())
    return StepLearning({Role.DECODE: decode}, directory, is_needed=is_needed)


def taught(directory: Path | None, seconds: int = 60) -> StepLearning:
    learner = learning(directory)
    for second in range(seconds):
        learner.read(Role.DECODE, {"http://worker": load(second)})
    return learner


def test_loads_teach_the_step_and_the_sizes_of_the_engine() -> None:
    known = taught(None).known()
    assert known.decode
    assert known.decode.decode_ms(4, 4000) == pytest.approx(STEP_MS, rel=0.05)
    assert (known.decode.kv_tokens, known.decode.request_slots) == (32_000, 8)
    assert known.lacking(is_disaggregated=False) == ""
    assert "prefill" in known.lacking(is_disaggregated=True)


def test_an_engine_that_sleeps_or_counts_nothing_teaches_nothing() -> None:
    learner = learning(None)
    for second in range(60):
        learner.read(Role.DECODE, {"http://worker": WorkerLoad(running_requests=1)})
        learner.read(Role.PREFILL, {"http://other": load(second)})
    assert learner.known().decode is None
    assert "does not count its steps" in learner.known().lacking(is_disaggregated=False)


def test_a_worker_that_does_not_answer_goes_on_and_one_that_is_gone_is_forgotten() -> None:
    decode = RoleLearning(StepLearner(UNKNOWN_MACHINE))
    for second in range(60):
        gone = {f"http://gone-{second}": load(second)}
        decode.read({"http://worker": load(second) if second % 2 else None, **gone})
    assert decode.known.equations
    assert set(decode.spans) == {"http://worker", "http://gone-59"}


def test_the_next_planner_begins_with_what_the_last_one_knew(tmp_path: Path) -> None:
    taught(tmp_path).save(0.0, is_due=True)
    known = learning(tmp_path).known()
    assert known.lacking(is_disaggregated=False) == ""
    assert known.decode
    assert known.decode.decode_ms(4, 4000) == pytest.approx(STEP_MS, rel=0.05)
    assert known.decode.kv_tokens == 32_000


def test_what_is_not_usable_yet_is_not_kept(tmp_path: Path) -> None:
    taught(tmp_path, seconds=5).save(0.0, is_due=True)
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    assert list_files(tmp_path) == []


def test_an_option_that_may_change_a_step_is_another_engine() -> None:
    assert of(parallel=4).file_name != of(parallel=8).file_name
    assert of(**{"served-model-name": "a"}).file_name == of(**{"served-model-name": "b"}).file_name
    assert of().file_name.startswith("llamacpp-tiny-decode-")


def test_only_the_newest_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learnt_files, "MAX_FILES", 2)
    known = LearntTiming(UNKNOWN_MACHINE, UNKNOWN_MACHINE)
    for age in (3, 2, 1):
        write_file(tmp_path, of(parallel=age), known)
        os.utime(tmp_path / of(parallel=age).file_name, (1000 - age, 1000 - age))
    write_file(tmp_path, of(parallel=1), known)
    assert [found.of["options"]["parallel"] for found in list_files(tmp_path)] == [1, 2]


def test_another_file_under_the_same_name_is_another_model(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    names = set()
    for text in (b"one", b"other"):
        model.write_bytes(text)
        names.add(of(model=str(model)).file_name)
    assert len(names) == 2


def test_a_file_that_cannot_be_read_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    assert read_file(tmp_path / "broken.json") is None
    assert read_file(tmp_path / "missing.json") is None


def test_the_prior_reads_the_weights_once_a_step() -> None:
    need = MemoryNeed(weights_bytes=16e9, token_bytes=131_072, context_tokens=8192)
    line = prior_line(need, BOX, 1)
    assert line.step_ms == pytest.approx(16.0)
    assert line.kv_token_ms == pytest.approx(131_072 / 1e9)
    assert prior_line(need, BOX, 2).step_ms == pytest.approx(8.0)
    assert prior_line(None, BOX, 1).step_ms == pytest.approx(8.0)


def test_no_profile_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in (PlannerSettings(policy="sla"), PlannerSettings(profile_results_dir="learnt")):
        assert not has_profile(settings)
        assert build_sla_model(settings).service.decode.kv_tokens > 0
    assert has_profile(PlannerSettings(profile_results_dir="h100-bf16"))
