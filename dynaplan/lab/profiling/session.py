"""A whole run of profile-sla: all tensor parallel sizes at the target, then the chosen ones' curves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynaplan.config.overrides import Sections
from dynaplan.config.service_config import section_options
from dynaplan.fleet.gpu_devices import available_gpus
from dynaplan.lab.profiling.load_points import (
    PREFILL_OSL_TOKENS,
    DecodeLoad,
    decode_points,
    prefill_lengths,
    selection_concurrencies,
    tensor_parallel_sizes,
)
from dynaplan.lab.profiling.measured_config import WORKER, Phase, measured_config, splits_layers
from dynaplan.lab.profiling.measured_deployment import (
    DeploymentRefused,
    EngineDidNotStart,
    EngineFacts,
    MeasurementPlan,
)
from dynaplan.lab.profiling.measurements import DecodeMeasurement, Measurements, PrefillMeasurement
from dynaplan.lab.profiling.recommendation import (
    Goal,
    Recommendation,
    best_decode,
    best_prefill,
    decode_choices,
    prefill_choices,
    recommend,
)
from dynaplan.lab.profiling.results import write_results
from dynaplan.lab.profiling.stage import (
    Journal,
    LoadsOf,
    Progress,
    Stage,
    StageResult,
    fingerprint,
    run_stage,
)
from dynaplan.util.errors import ConfigError, DynaplanError

DEFAULT_CONTEXT_TOKENS = 16_384
"""The context to which an engine is measured that does not state its own."""


class SizeUnusable(ConfigError):
    """An engine of this tensor parallel size cannot serve the target; another one may."""


@dataclass(frozen=True)
class ProfileOptions:
    """The options of the command.

    ``max_context_tokens`` None is the engine's own, ``gpus`` None all of the box, ``max_gpus`` (of one
    engine) None all of these. ``max_kv_tokens`` is for an engine that does not state it. ``origin`` is empty
    when an engine is measured; else it says that the points are estimated, and the box need not have the
    GPUs.
    """

    config: Sections
    output_dir: Path
    goal: Goal
    graph: str = "graphs.agg:Frontend"
    max_context_tokens: int | None = None
    prefill_granularity: int = 16
    decode_granularity: int = 6
    gpus: int | None = None
    min_gpus: int = 1
    max_gpus: int | None = None
    max_kv_tokens: int | None = None
    start_timeout_s: float = 1800.0
    origin: str = ""


@dataclass(frozen=True)
class ProfileResult:
    """The measurements, the recommendation, and the files that hold both."""

    measurements: tuple[Measurements, ...]
    recommendation: Recommendation
    files: tuple[Path, ...]


RunStage = Callable[[Stage, LoadsOf, Journal, Progress], Awaitable[StageResult]]
"""``run_stage``, or a fake one."""


async def profile(
    options: ProfileOptions, progress: Progress, run_stage: RunStage = run_stage
) -> ProfileResult:
    """Measure, recommend, write the results; points in the output directory's journal are not measured again.

    Raises ConfigError for a target that no engine can hold, CapacityError for missing GPUs, and
    DeploymentRefused, EngineDidNotStart or PermanentError when the engine fails; no deployment is left.
    """
    return await _Profiler(options, progress, run_stage).run()


class _Profiler:
    def __init__(self, options: ProfileOptions, progress: Progress, run_stage: RunStage) -> None:
        self._run_stage = run_stage
        self._options = options
        self._progress = progress
        _check_writable(options.output_dir)
        gpus, _ = available_gpus(None if options.origin else options.gpus)
        self._gpu_names = [gpu.name for gpu in gpus]
        self._sizes = _sizes(options, options.gpus or len(gpus))
        self._journal = Journal(options.output_dir)

    async def run(self) -> ProfileResult:
        goal, is_one = self._options.goal, len(self._sizes) == 1
        measured = await self._candidates(self._curve_loads if is_one else self._target_loads)
        if not is_one:
            prefill, _ = best_prefill(prefill_choices(measured, goal), goal.ttft_ms)
            decode, _ = best_decode(decode_choices(measured, goal), goal.itl_ms)
            chosen = {
                Phase.PREFILL: prefill.tensor_parallel_size,
                Phase.DECODE: decode.tensor_parallel_size,
            }
            measured = await self._with_curves(measured, chosen)
        recommendation = recommend(measured, goal.isl_tokens, goal.osl_tokens, goal.ttft_ms, goal.itl_ms)
        if origin := self._options.origin:
            profile = replace(recommendation.profile, origin=origin)
            recommendation = replace(recommendation, profile=profile, notes=(*recommendation.notes, origin))
        files = write_results(
            self._options.output_dir,
            recommendation,
            measured,
            self._options.config,
            splits_layers=splits_layers(self._options.config),
        )
        return ProfileResult(tuple(measured), recommendation, tuple(files))

    async def _candidates(self, loads_of: Callable[[Phase], LoadsOf]) -> list[Measurements]:
        """Measure every size; those that fail are left out. Raises the first failure when all fail."""
        measured: list[Measurements] = []
        failures: list[DynaplanError] = []
        for size in self._sizes:
            try:
                prefill = await self._stage(Phase.PREFILL, size, loads_of(Phase.PREFILL))
                decode = await self._stage(Phase.DECODE, size, loads_of(Phase.DECODE))
            except (DeploymentRefused, EngineDidNotStart, SizeUnusable) as error:
                failures.append(error)
                if len(self._sizes) > 1:
                    self._progress.report(f"TP {size} is left out: {error}")
                continue
            measured.append(_measurements(size, prefill, decode))
        if not measured:
            raise failures[0]
        return measured

    async def _with_curves(
        self, measured: Sequence[Measurements], chosen: Mapping[Phase, int]
    ) -> list[Measurements]:
        """Measure the curves of the chosen sizes, and add them to the measurements."""
        results = {
            phase: await self._stage(phase, size, self._curve_loads(phase)) for phase, size in chosen.items()
        }
        curves = []
        for each in measured:
            size = each.tensor_parallel_size
            found = {phase: results[phase] if chosen[phase] == size else None for phase in Phase}
            curves.append(_with(each, found[Phase.PREFILL], found[Phase.DECODE]))
        return curves

    async def _stage(self, phase: Phase, size: int, loads_of: LoadsOf) -> StageResult:
        options = self._options
        config = measured_config(options.config, phase, size)
        directory = options.output_dir / f"{phase.value}_tp{size}"
        plan = MeasurementPlan(
            options.graph, directory / "config.yaml", directory, options.gpus, options.start_timeout_s
        )
        mark = fingerprint(config, options.graph, self._gpu_names, options.max_kv_tokens, _files(config))
        stage = Stage(phase, size, config, mark, plan, options.max_kv_tokens)
        return await self._run_stage(stage, loads_of, self._journal, self._progress)

    def _target_loads(self, phase: Phase) -> LoadsOf:
        return self._target_prefill if phase is Phase.PREFILL else self._target_decode

    def _curve_loads(self, phase: Phase) -> LoadsOf:
        """The loads of a whole profile, the target's among them."""
        return self._curve_prefill if phase is Phase.PREFILL else self._curve_decode

    def _target_prefill(self, facts: EngineFacts) -> list[DecodeLoad]:
        self._check_fits(facts)
        return [DecodeLoad(self._options.goal.isl_tokens, PREFILL_OSL_TOKENS, 1)]

    def _target_decode(self, facts: EngineFacts) -> list[DecodeLoad]:
        self._check_fits(facts)
        goal = self._options.goal
        concurrencies = selection_concurrencies(
            facts.max_kv_tokens, goal.isl_tokens, goal.osl_tokens, facts.request_slots or None
        )
        return [DecodeLoad(goal.isl_tokens, goal.osl_tokens, each) for each in concurrencies]

    def _curve_prefill(self, facts: EngineFacts) -> list[DecodeLoad]:
        lengths = prefill_lengths(self._context_tokens(facts), self._options.prefill_granularity)
        return self._target_prefill(facts) + [DecodeLoad(each, PREFILL_OSL_TOKENS, 1) for each in lengths]

    def _curve_decode(self, facts: EngineFacts) -> list[DecodeLoad]:
        options = self._options
        points = decode_points(
            self._context_tokens(facts),
            facts.max_kv_tokens,
            options.decode_granularity,
            options.goal.osl_tokens,
            facts.request_slots or None,
        )
        return [*self._target_decode(facts), *points]

    def _context_tokens(self, facts: EngineFacts) -> int:
        """The longest request to measure, in tokens.

        ConfigError when more was asked for than the engine's context.
        """
        wanted = self._options.max_context_tokens
        if wanted and facts.context_tokens and wanted > facts.context_tokens:
            raise ConfigError(
                f"--max-context-length is {wanted}, the engine's context {facts.context_tokens} tokens",
                hint="Expected at most that, or a larger max-model-len in the configuration.",
            )
        return wanted or min(facts.context_tokens or DEFAULT_CONTEXT_TOKENS, facts.max_kv_tokens)

    def _check_fits(self, facts: EngineFacts) -> None:
        goal = self._options.goal
        tokens = goal.isl_tokens + goal.osl_tokens
        what = f"--isl is {goal.isl_tokens} and --osl {goal.osl_tokens}, together {tokens} tokens"
        context = self._options.max_context_tokens or facts.context_tokens
        if context and tokens > context:
            raise ConfigError(
                f"{what}: more than a context of {context}", hint="Expected max-model-len to hold both."
            )
        if tokens > facts.max_kv_tokens:
            raise SizeUnusable(
                f"{what}: more than the KV cache holds, {facts.max_kv_tokens}",
                hint="Expected shorter ones, or an engine with more memory.",
            )


def _sizes(options: ProfileOptions, gpus: int) -> tuple[int, ...]:
    """The tensor parallel sizes to try; raises ConfigError when there is none."""
    if not splits_layers(options.config):
        return (1,)
    most = min(gpus, options.max_gpus or gpus)
    sizes = tuple(size for size in tensor_parallel_sizes(most) if size >= options.min_gpus)
    if not sizes:
        raise ConfigError(
            f"--min-gpus-per-engine is {options.min_gpus}, the most is {most}",
            hint="Expected a power of two between the two.",
        )
    return sizes


def _measurements(size: int, prefill: StageResult, decode: StageResult) -> Measurements:
    return Measurements(
        size, size, decode.facts.max_kv_tokens, _prefill_points(prefill), _decode_points(decode)
    )


def _with(measured: Measurements, prefill: StageResult | None, decode: StageResult | None) -> Measurements:
    """Return the measurements with the new points of each phase; None leaves a phase as it is."""
    return Measurements(
        measured.tensor_parallel_size,
        measured.gpus,
        decode.facts.max_kv_tokens if decode else measured.max_kv_tokens,
        _prefill_points(prefill) if prefill else measured.prefill,
        _decode_points(decode) if decode else measured.decode,
    )


def _prefill_points(result: StageResult) -> tuple[PrefillMeasurement, ...]:
    return tuple(each for each in result.measured.values() if isinstance(each, PrefillMeasurement))


def _decode_points(result: StageResult) -> tuple[DecodeMeasurement, ...]:
    return tuple(each for each in result.measured.values() if isinstance(each, DecodeMeasurement))


def _files(config: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Size and time of the files that the worker's options name: another model is another engine."""
    options = section_options(config, WORKER)
    files = []
    for key in ("model", "profile"):
        path = Path(os.path.expanduser(str(options.get(key) or "")))
        if path.is_file():
            status = path.stat()
            files.append((key, status.st_size, status.st_mtime_ns))
    return files


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"is there permission, and space?")
    except OSError as error:
        raise ConfigError(
            f"--output-dir: cannot write to {directory}: {error.strerror}",
            hint="Expected a directory of yours, or one that can be made.",
        ) from error
