"""Which sizes are started, what is measured of each, and what comes of it. Engines are formulas here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dynaplan.lab.profiling.load_points import DecodeLoad
from dynaplan.lab.profiling.measured_config import Phase
from dynaplan.lab.profiling.measured_deployment import DeploymentRefused, EngineDidNotStart, EngineFacts
from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.lab.profiling.recommendation import Goal
from dynaplan.lab.profiling.session import ProfileOptions, profile
from dynaplan.lab.profiling.stage import Journal, LoadsOf, Measurement, Progress, Stage, StageResult
from dynaplan.util.errors import CapacityError, ConfigError, DynaplanError

GOAL = Goal(isl_tokens=1000, osl_tokens=200, ttft_ms=60.0, itl_ms=12.0)
FACTS = EngineFacts("m", context_tokens=4096, max_kv_tokens=40_000, request_slots=64)
CONFIG = {"VllmWorker": {"engine": "sim"}}


@dataclass
class Engines:
    """In the place of running deployments: faster with size, but not in proportion. Keeps what was asked."""

    facts: EngineFacts = FACTS
    broken: dict[int, DynaplanError] = field(default_factory=dict)
    asked: list[tuple[Phase, int, int]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    async def run(self, stage: Stage, loads_of: LoadsOf, _journal: Journal, _: Progress) -> StageResult:
        if stage.tensor_parallel_size in self.broken:
            raise self.broken[stage.tensor_parallel_size]
        loads = loads_of(self.facts)
        self.stages.append(stage)
        self.asked.append((stage.phase, stage.tensor_parallel_size, len(set(loads))))
        return StageResult(self.facts, {load: self._measure(stage, load) for load in loads})

    def _measure(self, stage: Stage, load: DecodeLoad) -> Measurement:
        speed = stage.tensor_parallel_size**0.8
        if stage.phase is Phase.PREFILL:
            return PrefillMeasurement(load.isl_tokens, (10.0 + 0.1 * load.isl_tokens) / speed)
        itl_ms = (8.0 + 0.1 * load.concurrency) / speed
        return DecodeMeasurement(*load, itl_ms, 1000.0 * load.concurrency / itl_ms)


@dataclass
class Reported:
    """Keeps what the user is told."""

    lines: list[str] = field(default_factory=list)

    def report(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def stage(self, label: str, points: int) -> Iterator[Callable[[], None]]:
        yield lambda: None


def options(directory: Path, **changes: Any) -> ProfileOptions:
    return replace(
        ProfileOptions(config=CONFIG, output_dir=directory, goal=GOAL, gpus=4, prefill_granularity=4),
        **changes,
    )


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaplan.lab.profiling.session.write_results", lambda *_, **__: [])


async def test_every_size_is_measured_at_the_target_and_the_chosen_ones_everywhere(tmp_path: Path) -> None:
    engines, reported = Engines(), Reported()
    result = await profile(options(tmp_path), reported, engines.run)
    candidates = engines.asked[:6]
    assert [(phase, size) for phase, size, _ in candidates] == [
        (phase, size) for size in (1, 2, 4) for phase in (Phase.PREFILL, Phase.DECODE)
    ]
    assert all(points == 1 for phase, _, points in candidates if phase is Phase.PREFILL)
    recommendation = result.recommendation
    chosen = [
        (Phase.PREFILL, recommendation.prefill.tensor_parallel_size),
        (Phase.DECODE, recommendation.decode.tensor_parallel_size),
    ]
    assert [(phase, size) for phase, size, _ in engines.asked[6:]] == chosen
    assert chosen[0] == (Phase.PREFILL, 4), "110 ms on one GPU, 63 on two: only four are within 60 ms"
    assert chosen[1] == (Phase.DECODE, 1), "it is within 12 ms, and gives the most for a GPU"
    assert len(recommendation.profile.prefill_isl) >= 4


async def test_a_single_size_is_started_once_for_each_half(tmp_path: Path) -> None:
    engines = Engines()
    await profile(options(tmp_path, max_gpus=1), Reported(), engines.run)
    assert [(phase, size) for phase, size, _ in engines.asked] == [(Phase.PREFILL, 1), (Phase.DECODE, 1)]


async def test_an_engine_without_tensor_parallelism_is_measured_at_one_size(tmp_path: Path) -> None:
    engines = Engines()
    config = {"VllmWorker": {"engine": "llamacpp"}}
    await profile(options(tmp_path, config=config), Reported(), engines.run)
    assert {size for _, size, _ in engines.asked} == {1}


@pytest.mark.parametrize("error", [EngineDidNotStart("out of memory"), DeploymentRefused("no such size")])
async def test_a_size_that_does_not_start_is_left_out_and_the_user_told_why(
    tmp_path: Path, error: DynaplanError
) -> None:
    engines, reported = Engines(broken={1: error}), Reported()
    result = await profile(options(tmp_path), reported, engines.run)
    assert {each.tensor_parallel_size for each in result.measurements} == {2, 4}
    assert any(line.startswith(f"TP 1 is left out: {error}") for line in reported.lines)


async def test_when_no_size_starts_the_first_ones_error_is_the_answer(tmp_path: Path) -> None:
    broken: dict[int, DynaplanError] = {size: EngineDidNotStart(f"at {size}") for size in (1, 2, 4)}
    with pytest.raises(EngineDidNotStart, match="at 1"):
        await profile(options(tmp_path), Reported(), Engines(broken=broken).run)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(FACTS, context_tokens=1100), "together 1200 tokens: more than a context of 1100"),
        (replace(FACTS, max_kv_tokens=1100), "more than the KV cache holds, 1100"),
    ],
)
async def test_a_target_that_the_engine_cannot_hold_is_refused(
    tmp_path: Path, facts: EngineFacts, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        await profile(options(tmp_path), Reported(), Engines(facts).run)


async def test_a_context_longer_than_the_engines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-context-length is 9000, the engine's context 4096"):
        await profile(options(tmp_path, max_gpus=1, max_context_tokens=9000), Reported(), Engines().run)


@pytest.mark.parametrize("gpus", [{"gpus": 0}, {"min_gpus": 8}])
async def test_no_gpus_are_a_clear_error(tmp_path: Path, gpus: dict[str, int]) -> None:
    with pytest.raises((ConfigError, CapacityError), match=r"GPU|gpus"):
        await profile(options(tmp_path, **gpus), Reported(), Engines().run)


async def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output-dir"):
        await profile(options(tmp_path / "file" / "results"), Reported(), Engines().run)


async def test_another_model_file_is_another_engine(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    marks = []
    for content in ("one", "another"):
        model.write_text(content)
        engines = Engines()
        config = {"VllmWorker": {"engine": "llamacpp", "model": str(model)}}
        await profile(options(tmp_path / "results", config=config), Reported(), engines.run)
        marks.append(engines.stages[0].fingerprint)
    assert marks[0] != marks[1]
