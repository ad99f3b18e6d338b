"""Stages of a sweep that no engine runs for: ``profile-sla --estimate`` computes their points."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynaplan.config.overrides import Sections
from dynaplan.config.service_config import section_options
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.lab.profiling.engine_facts import EngineFacts
from dynaplan.lab.profiling.gpu_sheets import GpuSheet, gpu_sheet, name_of
from dynaplan.lab.profiling.journal import Journal
from dynaplan.lab.profiling.loads import DecodeLoad
from dynaplan.lab.profiling.measured_config import WORKER, Phase
from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.lab.profiling.model_shape import ModelShape, shape_of
from dynaplan.lab.profiling.roofline import Roofline, origin_words
from dynaplan.lab.profiling.session import KvTooSmall
from dynaplan.lab.profiling.stage import LoadsOf, Measurement, Progress, Stage, StageResult
from dynaplan.planner import factory
from dynaplan.util.errors import ConfigError

USED_FRACTION = 0.9
"""The part of a GPU's memory that vLLM takes unless ``gpu-memory-utilization`` says otherwise."""

REQUEST_SLOTS = 256
"""The requests that one worker decodes together unless ``max-num-seqs`` says otherwise."""

CONFIG_FILE = "config.json"

MEASURED_ENGINE = "vllm"
"""The engine that the simulated one stands for, as in the shipped profiles."""

ROOFLINE, AICONFIGURATOR = "roofline", "aiconfigurator"
"""The estimators: our own formula, or NVIDIA's library with its tables of operators."""


class OperatorTimes(Protocol):
    """The times of a model on a kind of GPU, added up of measured operators; each takes seconds."""

    @property
    def backend(self) -> str:
        """The engine that was measured."""
        ...

    @property
    def version(self) -> str:
        """The version of the library."""
        ...

    def prefill_ms(self, isl_tokens: int, tensor_parallel_size: int) -> float:
        """Return the TTFT of one prompt alone, in ms; raises ConfigError where nothing was measured."""
        ...

    def decode_ms(self, isl_tokens: int, osl_tokens: int, requests: int, tensor_parallel_size: int) -> float:
        """Return the mean ITL of that many requests, in ms; raises ConfigError where nothing was measured."""
        ...


@dataclass(frozen=True)
class EstimatedEngine:
    """A model on a kind of GPU, by the names that the user knows.

    ``operators`` estimates the points, None the roofline; the KV cache is the roofline's in either case.
    """

    model: str
    gpu_type: str
    shape: ModelShape
    gpu: GpuSheet
    operators: OperatorTimes | None = None

    @property
    def origin(self) -> str:
        """The words that go with every point."""
        if self.operators:
            place = f"{self.model} on {self.gpu_type} with {self.operators.backend}"
            return f"estimated, not measured: by aiconfigurator {self.operators.version}, of {place}"
        return origin_words(self.model, self.gpu_type)

    async def run_stage(
        self, stage: Stage, loads_of: LoadsOf, journal: Journal, progress: Progress
    ) -> StageResult:
        """Return the points that an engine would be measured at; raises ConfigError where none can be."""
        size, options = stage.tensor_parallel_size, section_options(stage.config, WORKER)
        if self.shape.heads % size:
            raise KvTooSmall(f"{self.shape.heads} attention heads cannot be split over {size} GPUs")
        engine = Roofline(self.shape, self.gpu, size, _kv_value_bytes(options))
        facts = EngineFacts(
            self.model,
            int(options.get("max-model-len") or self.shape.context_tokens),
            stage.max_kv_tokens or self._kv_tokens(engine, options),
            int(options.get("max-num-seqs") or REQUEST_SLOTS),
        )
        loads = loads_of(facts)
        points: dict[DecodeLoad, Measurement] = {}
        if self.operators:
            with progress.stage(stage.label, len(loads)) as advance:
                for load in loads:
                    points[load] = await asyncio.to_thread(_by_operators, self.operators, stage, load)
                    advance()
        else:
            points = {load: _point(engine, stage.phase, load) for load in loads}
        progress.say(f"{stage.label}: {len(loads)} points estimated")
        return StageResult(facts, points)

    def _kv_tokens(self, engine: Roofline, options: Mapping[str, Any]) -> int:
        used = float(options.get("gpu-memory-utilization") or USED_FRACTION)
        kv_tokens = engine.max_kv_tokens(used)
        if kv_tokens < 1:
            weights_gb = self.shape.held_bytes / engine.tensor_parallel_size / 1e9
            raise KvTooSmall(
                f"{weights_gb:.1f} GB of weights, and what an engine needs beside them, do not fit into "
                f"{used:.0%} of the {self.gpu.memory_bytes / 1e9:.1f} GB of {self.gpu_type}",
                hint="Expected more GPUs (--gpus, --max-gpus-per-engine), or another --gpu-type.",
            )
        return kv_tokens


def estimated_engine(
    config: Sections,
    gpu_type: str | None,
    model_config: Path | None,
    driver_names: tuple[str, ...],
    estimator: str = ROOFLINE,
) -> EstimatedEngine:
    """Return the engine of a configuration; ``driver_names`` are those of the box's GPUs.

    ``model_config`` is a config.json or its directory, None the directory that the worker's ``model`` names.
    Raises ConfigError for a GPU or a model that is not known, and for an estimator that is not there.
    """
    options = section_options(config, WORKER)
    path = _config_path(model_config, str(options.get("model") or ""))
    found = gpu_type or next(filter(None, map(name_of, driver_names)), "")
    if not found:
        raise ConfigError(
            "no GPU of this box has a data sheet here", hint="Add --gpu-type, such as --gpu-type h100_sxm."
        )
    shape = shape_of(_document(path), str(path))
    frontend = section_options(config, "Frontend")
    named = frontend.get("served-model-name") or options.get("served-model-name") or options.get("model")
    operators = None
    if estimator == AICONFIGURATOR:
        engine = engine_of(options)
        measured = MEASURED_ENGINE if engine == SIMULATED else engine
        operators = factory.operator_times(str(path.parent), found, measured)
    return EstimatedEngine(str(named or path.parent.name), found, shape, gpu_sheet(found), operators)


def _config_path(given: Path | None, model: str) -> Path:
    place = given or Path(model).expanduser()
    path = place / CONFIG_FILE if place.is_dir() else place
    if path.is_file() and path.suffix == ".json":
        return path
    raise ConfigError(
        f"--model-config is '{given}', where there is no {CONFIG_FILE}"
        if given
        else f"{WORKER}.model is '{model}', which is no directory with a {CONFIG_FILE} here",
        hint=f"Add --model-config with the path of the model's {CONFIG_FILE}, or of its directory.",
    )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="Expected a JSON object.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no JSON object", hint=f"Expected a Hugging Face {CONFIG_FILE}.")
    return document


def _kv_value_bytes(options: Mapping[str, Any]) -> float:
    return 1.0 if "8" in str(options.get("kv-cache-dtype") or "") else 2.0


def _by_operators(operators: OperatorTimes, stage: Stage, load: DecodeLoad) -> Measurement:
    size = stage.tensor_parallel_size
    if stage.phase is Phase.PREFILL:
        return PrefillMeasurement(load.isl_tokens, operators.prefill_ms(load.isl_tokens, size))
    itl_ms = operators.decode_ms(*load, size)
    return DecodeMeasurement(*load, itl_ms, 1000 * load.concurrency / itl_ms)


def _point(engine: Roofline, phase: Phase, load: DecodeLoad) -> Measurement:
    if phase is Phase.PREFILL:
        return PrefillMeasurement(load.isl_tokens, engine.prefill_ms(load.isl_tokens))
    kv_tokens = load.concurrency * (load.isl_tokens + load.osl_tokens / 2)
    itl_ms = engine.decode_ms(load.concurrency, kv_tokens)
    return DecodeMeasurement(*load, itl_ms, 1000 * load.concurrency / itl_ms)
