"""One stage of a sweep: start a deployment, measure its missing points, end it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynaplan.config.overrides import Sections
from dynaplan.config.settings.worker import SIMULATED
from dynaplan.lab.profiling.deployment import MeasuredDeployment, Plan
from dynaplan.lab.profiling.engine_facts import EngineFacts, engine_facts, served_model
from dynaplan.lab.profiling.journal import Journal
from dynaplan.lab.profiling.load.aiperf import Aiperf
from dynaplan.lab.profiling.load.completions import CompletionClient
from dynaplan.lab.profiling.load.load_generator import LoadGenerator
from dynaplan.lab.profiling.load.meters import DecodeMeter, measure_prefill, warm_up
from dynaplan.lab.profiling.loads import DecodeLoad
from dynaplan.lab.profiling.measured_config import Phase, engine_name
from dynaplan.lab.profiling.measurements import DecodeMeasurement, PrefillMeasurement
from dynaplan.util.errors import ConfigError

LoadsOf = Callable[[EngineFacts], Sequence[DecodeLoad]]
"""Plans the loads for an engine with these facts."""

Measurement = PrefillMeasurement | DecodeMeasurement


class Progress(Protocol):
    """The display of the progress to the user."""

    def say(self, line: str) -> None:
        """Print one line, now, between those of the progress."""

    def stage(self, label: str, points: int) -> AbstractContextManager[Callable[[], None]]:
        """Begin a stage with a number of points; the context's value is to be called after each point."""


@dataclass(frozen=True)
class Stage:
    """One phase of one tensor parallel size, and the deployment to start for it.

    ``fingerprint`` distinguishes this configuration from all others. ``aiperf`` is the path of the program
    that sends the load, empty for our own generator.
    """

    phase: Phase
    tensor_parallel_size: int
    config: Sections
    fingerprint: str
    plan: Plan
    max_kv_tokens: int | None = None
    aiperf: str = ""

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
            progress.say(f"{stage.label}: all {len(loads)} points are in the journal")
            return _result(stage, facts, loads, journal)
    _write_config(stage)
    progress.say(f"{stage.label}: starting, log in {stage.plan.log_path}")
    async with MeasuredDeployment(stage.plan) as deployment:
        model = await served_model(deployment.url)
        engine = engine_name(stage.config)
        async with CompletionClient(deployment.url, model, takes_text=engine == SIMULATED) as client:
            await warm_up(client)
            facts = await engine_facts(deployment.url, deployment.worker_url, engine, stage.max_kv_tokens)
            journal.add(stage.key(engine=True), facts.to_document())
            loads = loads_of(facts)
            await _measure(stage, _generator(stage, client), loads, journal, progress)
    return _result(stage, facts, loads, journal)


def _generator(stage: Stage, client: CompletionClient) -> LoadGenerator:
    return Aiperf(stage.aiperf, client, stage.plan.directory / "aiperf") if stage.aiperf else client


async def _measure(
    stage: Stage,
    generator: LoadGenerator,
    loads: Sequence[DecodeLoad],
    journal: Journal,
    progress: Progress,
) -> None:
    missing = _missing(stage, loads, journal)
    if len(missing) < len(loads):
        progress.say(f"{stage.label}: {len(loads) - len(missing)} of {len(loads)} points are in the journal")
    meter = DecodeMeter(generator)
    notes: list[str] = []
    with progress.stage(stage.label, len(missing)) as advance:
        for load in missing:
            measurement: Measurement | None
            if stage.phase is Phase.PREFILL:
                measurement = await measure_prefill(generator, load)
            else:
                measurement = await meter.measure(load)
            notes += _notes(load, measurement)
            journal.add(stage.key(**load._asdict()), measurement.to_document() if measurement else {})
            advance()
    for note in notes:
        progress.say(f"{stage.label}: {note}")


def _notes(load: DecodeLoad, measurement: Measurement | None) -> list[str]:
    """Warn the user of a point that differs from the requested load."""
    what = f"{load.concurrency} requests of {load.isl_tokens} + {load.osl_tokens} tokens"
    if measurement is None:
        return [f"left out {what}: their tokens came too fast to tell them apart"]
    if isinstance(measurement, DecodeMeasurement) and measurement.concurrency < load.concurrency:
        return [f"{what} never decoded side by side: {measurement.concurrency} were measured instead"]
    return []


def _missing(stage: Stage, loads: Sequence[DecodeLoad], journal: Journal) -> list[DecodeLoad]:
    """The loads without a measurement, those included that could not be measured the last time."""
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
