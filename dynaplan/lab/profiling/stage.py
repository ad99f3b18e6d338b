"""One stage of a sweep: start a deployment, measure the points that the journal lacks, end it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from dynaplan.config.overrides import Sections
from dynaplan.config.settings.worker import SIMULATED
from dynaplan.lab.profiling.load.completions import CompletionClient, open_client, served_model
from dynaplan.lab.profiling.load.meters import DecodeMeter, measure_prefill, warm_up
from dynaplan.lab.profiling.load.prompts import PromptPool
from dynaplan.lab.profiling.load_points import DecodeLoad
from dynaplan.lab.profiling.measured_config import Phase, engine_name
from dynaplan.lab.profiling.measured_deployment import (
    EngineFacts,
    MeasuredDeployment,
    MeasurementPlan,
    engine_facts,
)
from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.util.errors import ConfigError

LoadsOf = Callable[[EngineFacts], Sequence[DecodeLoad]]
"""Plans the loads for an engine with these facts."""

Measurement = PrefillMeasurement | DecodeMeasurement

SEED = 100
"""The seed of all prompts, as in the original."""

JOURNAL_FILE = "measurements.jsonl"
"""The name of the journal in the output directory."""


class Progress(Protocol):
    """The display of the progress to the user."""

    def report(self, line: str) -> None:
        """Print one line between those of the progress."""

    def stage(self, label: str, points: int) -> AbstractContextManager[Callable[[], None]]:
        """Begin a stage with a number of points; the context's value is to be called after each point."""


@dataclass(frozen=True)
class Stage:
    """One phase of one tensor parallel size, and the deployment to start for it.

    ``fingerprint`` distinguishes this configuration from all others.
    """

    phase: Phase
    tensor_parallel_size: int
    config: Sections
    fingerprint: str
    plan: MeasurementPlan
    max_kv_tokens: int | None = None

    @property
    def label(self) -> str:
        """The name that the user sees."""
        return f"{self.phase.value} TP {self.tensor_parallel_size}"

    def key(self, **what: Any) -> dict[str, Any]:
        """Return the journal's key of a fact or a point of this configuration."""
        base = {"kind": self.phase.value, "tensor_parallel_size": self.tensor_parallel_size}
        return {**base, "fingerprint": self.fingerprint, **what}


@dataclass(frozen=True)
class StageResult:
    """The engine's facts, and its measurements in the order of their loads."""

    facts: EngineFacts
    measured: Mapping[DecodeLoad, Measurement]


async def run_stage(stage: Stage, loads_of: LoadsOf, journal: Journal, progress: Progress) -> StageResult:
    """Measure the loads that the journal does not have; start nothing when it has them all.

    Raises DeploymentRefused or EngineDidNotStart when the deployment does not come up, PermanentError when
    an answer fails, and the errors of ``loads_of``; the deployment has ended then.
    """
    known = journal.find(stage.key(engine=True))
    if known is not None:
        facts = EngineFacts.from_document(known)
        loads = loads_of(facts)
        if not _missing(stage, loads, journal):
            progress.report(f"{stage.label}: all {len(loads)} points are in the journal")
            return _result(stage, facts, loads, journal)
    _write_config(stage)
    progress.report(f"{stage.label}: starting, log in {stage.plan.log_path}")
    async with MeasuredDeployment(stage.plan) as deployment:
        engine = engine_name(stage.config)
        async with open_client() as http:
            model = await served_model(http, deployment.url)
            client = CompletionClient(http, deployment.url, model)
            prompts = PromptPool(is_text=engine == SIMULATED, seed=SEED)
            await warm_up(client, prompts)
            facts = await engine_facts(model, deployment, engine, stage.max_kv_tokens)
            journal.add(stage.key(engine=True), asdict(facts))
            loads = loads_of(facts)
            await _measure(stage, client, prompts, loads, journal, progress)
    return _result(stage, facts, loads, journal)


async def _measure(
    stage: Stage,
    client: CompletionClient,
    prompts: PromptPool,
    loads: Sequence[DecodeLoad],
    journal: Journal,
    progress: Progress,
) -> None:
    missing = _missing(stage, loads, journal)
    if len(missing) < len(loads):
        progress.report(
            f"{stage.label}: {len(loads) - len(missing)} of {len(loads)} points are in the journal"
        )
    meter = DecodeMeter(client, prompts)
    notes: list[str] = []
    with progress.stage(stage.label, len(missing)) as advance:
        for load in missing:
            measurement: Measurement | None
            if stage.phase is Phase.PREFILL:
                measurement = await measure_prefill(client, prompts, load)
            else:
                measurement = await meter.measure(load)
            notes += _notes(load, measurement)
            journal.add(stage.key(**load._asdict()), asdict(measurement) if measurement else {})
            advance()
    for note in notes:
        progress.report(f"{stage.label}: {note}")


def _notes(load: DecodeLoad, measurement: Measurement | None) -> list[str]:
    """Return warnings for the user, if a point differs from the requested load."""
    what = f"{load.concurrency} requests of {load.isl_tokens} + {load.osl_tokens} tokens"
    if measurement is None:
        return [f"left out {what}: their tokens came too fast to tell them apart"]
    if isinstance(measurement, DecodeMeasurement) and measurement.concurrency < load.concurrency:
        return [f"{what} never decoded side by side: {measurement.concurrency} were measured instead"]
    return []


def _missing(stage: Stage, loads: Sequence[DecodeLoad], journal: Journal) -> list[DecodeLoad]:
    """The loads without a measurement in the journal, those that could not be measured last time included."""
    return [load for load in dict.fromkeys(loads) if not journal.find(stage.key(**load._asdict()))]


def _result(stage: Stage, facts: EngineFacts, loads: Sequence[DecodeLoad], journal: Journal) -> StageResult:
    read = PrefillMeasurement if stage.phase is Phase.PREFILL else DecodeMeasurement
    found = {load: journal.find(stage.key(**load._asdict())) for load in dict.fromkeys(loads)}
    return StageResult(facts, {load: read.from_document(values) for load, values in found.items() if values})


def _write_config(stage: Stage) -> None:
    import yaml

    path: Path = stage.plan.config_path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(stage.config, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--output-dir: {path} cannot be written: {error.strerror}") from error


def fingerprint(*documents: object) -> str:
    """Return a short name of a configuration; equal for equal JSON documents."""
    text = json.dumps(documents, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The measurements of an output directory, written as soon as they are known.

    So an interruption costs nothing. Each line of the file is one JSON object: the point and the fingerprint
    of its configuration, and the values. Methods raise ConfigError when it cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL_FILE
        self._known: dict[str, dict[str, Any]] = {}
        self._needs_newline = False
        self._read()

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the values that were written for that key, None without any."""
        return self._known.get(_key_text(key))

    def add(self, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Append one measurement as a line; raises ConfigError when it cannot be written."""
        line = json.dumps({"key": dict(key), "values": dict(values)})
        try:
            with self._path.open("a") as file:
                file.write(("\n" if self._needs_newline else "") + line + "\n")
        except OSError as error:
            raise _unusable(self._path, error) from error
        self._needs_newline = False
        self._known[_key_text(key)] = dict(values)

    def _read(self) -> None:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(self._path, error) from error
        self._needs_newline = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._known[_key_text(entry["key"])] = dict(entry["values"])
            except (ValueError, KeyError, TypeError):
                continue  # a write that was interrupted; it is measured anew


def _key_text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"--output-dir: {path} cannot be used: {error}", hint="Expected a directory of yours.")
