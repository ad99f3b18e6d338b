"""Stages of a sweep that no engine runs for: ``profile-sla --estimate``, by NVIDIA's AI Configurator.

It adds up measured times of the operators of a GPU, an engine and its version. The library is the user's to
install (Apache-2.0; with its tables 850 MB). Source of the call: its ``cli_estimate`` (0.12.0), whose static
modes compute one batch without scheduling.

The library estimates times only. What an engine states of itself comes from options: the size of the KV
cache from ``--max-kv-tokens``, context and request slots from the worker's section.
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from typing import Any

from dynaplan.config.overrides import Sections
from dynaplan.config.service_config import section_options
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.engines.registry import ENGINES, engine_kind
from dynaplan.lab.profiling.load_points import DecodeLoad
from dynaplan.lab.profiling.measured_config import WORKER, Phase
from dynaplan.lab.profiling.measured_deployment import EngineFacts
from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.lab.profiling.session import SizeUnusable
from dynaplan.lab.profiling.stage import Journal, LoadsOf, Measurement, Progress, Stage, StageResult
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class AiConfigurator:
    """The times of a model on a kind of GPU, under an engine.

    ``model`` is a directory with its config.json, or a name of Hugging Face's. Each time takes seconds to
    compute. Methods raise ConfigError for what it has no tables of.
    """

    model: str
    gpu_type: str
    backend: str
    version: str
    api: Any

    def prefill_ms(self, isl_tokens: int, tensor_parallel_size: int) -> float:
        """Return the TTFT of one prompt alone, in ms."""
        size = tensor_parallel_size
        return float(self._estimate("static_ctx", isl=isl_tokens, osl=1, batch_size=1, tp_size=size).ttft)

    def decode_ms(self, isl_tokens: int, osl_tokens: int, requests: int, tensor_parallel_size: int) -> float:
        """Return the mean ITL of that many requests that decode together, in ms."""
        lengths = {"isl": isl_tokens, "osl": osl_tokens}
        size = tensor_parallel_size
        return float(self._estimate("static_gen", **lengths, batch_size=requests, tp_size=size).tpot)

    def _estimate(self, mode: str, **sizes: int) -> Any:
        try:
            return self.api.cli_estimate(
                self.model, self.gpu_type, mode=mode, backend_name=self.backend, **sizes
            )
        except Exception as error:
            # Whatever its tables lack: it raises errors of many kinds, of its own and built-in ones.
            raise ConfigError(
                f"aiconfigurator {self.version} cannot estimate {self.model} on {self.gpu_type} with"
                f" {self.backend}: {error}",
                hint="Without --estimate the engine is measured.",
            ) from error


def find_aiconfigurator(model: str, gpu_type: str, engine: str) -> AiConfigurator:
    """Return what estimates the model's times.

    ConfigError if aiconfigurator is missing or lacks the engine.
    """
    if not engine_kind(engine).is_dynamo_backend:
        known = ", ".join(name for name in ENGINES if engine_kind(name).is_dynamo_backend)
        raise ConfigError(f"aiconfigurator knows no engine '{engine}'", hint=f"Expected one of {known}.")
    try:
        api = importlib.import_module("aiconfigurator.cli.api")
        version = importlib.import_module("importlib.metadata").version("aiconfigurator")
    except ImportError as error:
        raise ConfigError(
            f"--estimate needs aiconfigurator, which is not installed ({error})",
            hint="Run: pip install aiconfigurator; or measure the engine, without --estimate.",
        ) from error
    return AiConfigurator(model, gpu_type, engine, version, api)


REQUEST_SLOTS = 256
"""The requests that one worker decodes together unless ``max-num-seqs`` says otherwise."""

MEASURED_ENGINE = "vllm"
"""The engine that the simulated one stands for, as in the shipped profiles."""


@dataclass(frozen=True)
class EstimatedEngine:
    """A model on a kind of GPU, by aiconfigurator's names of both."""

    model: str
    gpu_type: str
    times: AiConfigurator

    @property
    def origin(self) -> str:
        """What every point is marked with: estimated, and by what."""
        place = f"{self.model} on {self.gpu_type} with {self.times.backend}"
        return f"estimated, not measured: by aiconfigurator {self.times.version}, of {place}"

    async def run_stage(
        self, stage: Stage, loads_of: LoadsOf, journal: Journal, progress: Progress
    ) -> StageResult:
        """Return estimates of the points at which an engine would be measured.

        SizeUnusable where one has none.
        """
        options = section_options(stage.config, WORKER)
        facts = EngineFacts(
            self.model,
            int(options.get("max-model-len") or 0),
            stage.max_kv_tokens or 0,
            int(options.get("max-num-seqs") or REQUEST_SLOTS),
        )
        loads = loads_of(facts)
        points: dict[DecodeLoad, Measurement] = {}
        with progress.stage(stage.label, len(loads)) as advance:
            for load in loads:
                points[load] = await asyncio.to_thread(self._estimate, stage, load)
                advance()
        progress.report(f"{stage.label}: {len(loads)} points estimated")
        return StageResult(facts, points)

    def _estimate(self, stage: Stage, load: DecodeLoad) -> Measurement:
        size = stage.tensor_parallel_size
        try:
            if stage.phase is Phase.PREFILL:
                return PrefillMeasurement(load.isl_tokens, self.times.prefill_ms(load.isl_tokens, size))
            itl_ms = self.times.decode_ms(*load, size)
        except ConfigError as error:
            raise SizeUnusable(str(error.args[0]), hint=error.hint) from error
        return DecodeMeasurement(*load, itl_ms, 1000 * load.concurrency / itl_ms)


def estimated_engine(config: Sections, gpu_type: str | None, max_kv_tokens: int | None) -> EstimatedEngine:
    """Return the engine of a configuration: its worker's ``model``, a directory or a name of Hugging Face's.

    Raises ConfigError for an option that is missing, and where aiconfigurator is not installed.
    """
    options = section_options(config, WORKER)
    model = str(options.get("model") or "")
    if not model:
        raise ConfigError(f"{WORKER}.model is not set", hint="Expected the model to estimate.")
    if not gpu_type:
        raise ConfigError("--estimate lacks the kind of GPU", hint="Add --gpu-type, such as h100_sxm.")
    if not max_kv_tokens:
        raise ConfigError(
            "--estimate lacks the tokens that one engine's KV cache holds",
            hint="Add --max-kv-tokens N; engines print it when they start.",
        )
    engine = engine_of(options)
    backend = MEASURED_ENGINE if engine == SIMULATED else engine
    return EstimatedEngine(model, gpu_type, find_aiconfigurator(model, gpu_type, backend))
