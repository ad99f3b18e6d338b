"""A deployment of each engine, and the report of all parts, which is written at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynaplan.contract.gpus import Gpu, visible_gpus
from dynaplan.engines.pulled_models import CATALOGUE, models_dir, pull
from dynaplan.fleet.gpu_devices import activity_reader, driver_version, nvml, uses_reader
from dynaplan.fleet.gpu_devices import simulated as simulated_gpus
from dynaplan.util.errors import TemporaryError
from tests.e2e.deployment import Deployment
from tests.gpu import engines
from tests.gpu.engines import Engine, NotInstalled
from tests.gpu.report import Part, Report, facts_of_box

ENGINES_VARIABLE = "DYNAPLAN_GPU_ENGINES"
"""The engines to run, with commas between them; ``simulated`` needs no GPU."""

ENGINES = ("vllm", "llama-server", "simulated")

REPORT_VARIABLE = "DYNAPLAN_GPU_REPORT"
"""The directory of the report."""

FREED_S = 60.0
SPARE_GB = 1.0
"""What other programs may take of a GPU's memory meanwhile."""

PLANNER = {"policy": "sla", "ttft": 2000, "itl": 100, "max-gpu-budget": 1}
EVERY = {"adjustment-interval": 3, "metric-pulling-interval": 0.5}


@dataclass(frozen=True)
class Box:
    """A deployment of one engine: the model ``tested`` has a planner, and ``sleeper`` may sleep."""

    engine: Engine
    deployment: Deployment
    gpus: tuple[Gpu, ...]
    before_gb: float

    @property
    def held_gb(self) -> float:
        """The memory that is in use on the GPUs beyond that before the deployment."""
        return used_gb(self.gpus) - self.before_gb

    @property
    def watts(self) -> float:
        """The power of all GPUs, the mean of a few seconds."""
        read, seen = activity_reader(self.gpus), []
        for _ in range(10 if self.engine.name != "simulated" else 1):
            seen.append(sum(each.watts or 0.0 for each in read().values()))
            time.sleep(0.3)
        return sum(seen) / len(seen)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "box" in metafunc.fixturenames:
        metafunc.parametrize("box", _engine_names(), indirect=True, scope="module")


def _engine_names() -> list[str]:
    text = os.environ.get(ENGINES_VARIABLE, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ENGINES]:
        raise pytest.UsageError(f"{ENGINES_VARIABLE}: no engine {unknown[0]!r}; known: {', '.join(ENGINES)}")
    return names or ["vllm", "llama-server"]


def used_gb(gpus: tuple[Gpu, ...]) -> float:
    """Return the memory in use on these GPUs, by whomever."""
    return sum(use.used_bytes for use in uses_reader(gpus)().values()) / 1e9


@pytest.fixture(scope="module")
def box(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_hf: Path
) -> Iterator[Box]:
    """Start the two models of an engine; at the end the memory of the GPUs is what it was."""
    gpus = _gpus(str(request.param))
    engine = _engine(str(request.param), tiny_hf)
    directory = tmp_path_factory.mktemp(engine.name)
    (directory / "models.yaml").write_text(json.dumps(_models(engine)))
    request.config.stash.setdefault(VERSIONS, {})[engine.name] = engine.version
    with Deployment(directory, str(directory / "models.yaml"), "") as deployment:
        deployment.command[0] = engine.program or deployment.command[0]
        made = Box(engine, deployment, gpus, used_gb(gpus))
        deployment.start()
        yield made
    assert made.held_gb < SPARE_GB


def _engine(name: str, tiny_hf: Path) -> Engine:
    try:
        if name == "simulated":
            return engines.simulated()
        return engines.vllm(tiny_hf) if name == "vllm" else engines.llama_server(_pulled)
    except (NotInstalled, TemporaryError) as error:
        pytest.skip(str(error))


def _pulled() -> Path:
    return pull(CATALOGUE["smollm2"], models_dir({"XDG_CACHE_HOME": str(Path(sys.prefix) / "cache")}))


def _gpus(name: str) -> tuple[Gpu, ...]:
    if name == "simulated":
        return simulated_gpus(1)
    if not nvml():
        pytest.skip(f"no NVIDIA GPU here: {driver_version()[1]}")
    if not (found := _visible()):
        pytest.skip("CUDA_VISIBLE_DEVICES shows none of the GPUs")
    return found


def _visible() -> tuple[Gpu, ...]:
    return visible_gpus(nvml(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _models(engine: Engine) -> Mapping[str, Any]:
    idle = {"ttl": engine.ttl_s, "power-saving-after": 1.75 * engine.ttl_s}
    sleeper = {**engine.entry, **idle, **({"enable-sleep-mode": True} if engine.sleeps else {})}
    return {"Models": {"tested": {**engine.entry, "Planner": {**PLANNER, **EVERY}}, "sleeper": sleeper}}


VERSIONS = pytest.StashKey[dict[str, str]]()
PARTS = pytest.StashKey[list[Part]]()


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Write figures of this part into the report."""

    def write(**figures: object) -> None:
        for name, value in figures.items():
            record_property(name, value)

    return write


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc]
    if report.when == "call" or not report.passed:
        item.config.stash.setdefault(PARTS, []).append(part_of(item.name, report))
    return report  # type: ignore[return-value]


def part_of(test: str, report: pytest.TestReport) -> Part:
    """Return what the report says of a part; the end of the deployment is a part of its own."""
    name, _, engine = test.removeprefix("test_").partition("[")
    words = "the deployment ends" if report.when == "teardown" else name.replace("_", " ")
    figures = {} if report.when == "teardown" else dict(report.user_properties)
    return Part(engine.removesuffix("]"), words, report.outcome, report.duration, figures, _why(report))


def _why(report: pytest.TestReport) -> str:
    """Return the reason of what was skipped, and the first line of what has failed."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).splitlines()[0] if crash else ""


def pytest_sessionfinish(session: pytest.Session) -> None:
    directory = os.environ.get(REPORT_VARIABLE)
    if directory and (parts := session.config.stash.get(PARTS, [])):
        report = Report(facts_of_box(_visible()), session.config.stash.get(VERSIONS, {}), tuple(parts))
        report.write(Path(directory))
        print(f"\n\n{report.to_markdown()}\nThe report is in {directory}: attach it to an issue.")
