"""The report of a run on a box's GPUs, as it is attached to an issue: what was measured, where, with what."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dynaplan import __version__
from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.gpu_devices import driver_version, power_limits

Figures = Mapping[str, Any]

NAMES = ("report.md", "report.json")


@dataclass(frozen=True)
class Part:
    """One part of the run: ``outcome`` is passed, failed or skipped, and ``why`` its reason."""

    engine: str
    name: str
    outcome: str
    seconds: float
    figures: Figures = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Report:
    """``box`` tells the machine, the driver and dynaplan, ``engines`` the versions of what was run."""

    box: Mapping[str, str]
    engines: Mapping[str, str]
    parts: tuple[Part, ...]

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        markdown, document = (directory / name for name in NAMES)
        markdown.write_text(self.to_markdown())
        document.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def to_markdown(self) -> str:
        facts = "\n".join(f"- {name}: {value}" for name, value in {**self.box, **self.engines}.items())
        rows = "\n".join(map(_row, self.parts))
        return f"# dynaplan on this box's GPUs\n\n{facts}\n\n{HEAD}\n{rows}\n"


HEAD = "| engine | part | outcome | seconds | figures |\n|---|---|---|--:|---|"


def _row(part: Part) -> str:
    figures = ", ".join(f"{name} {_shown(value)}" for name, value in part.figures.items())
    told = "; ".join(filter(None, (figures, part.why))).replace("|", "\\|")
    return f"| {part.engine} | {part.name} | {part.outcome} | {part.seconds:.1f} | {told} |"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def facts_of_box(gpus: Iterable[Gpu]) -> dict[str, str]:
    """Return what a reader of the report has to know of this machine; nothing of whose it is."""
    gpus = tuple(gpus)
    limits = power_limits(gpus).read()
    shown = (
        f"{gpu.index} {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GB"
        + (f", {limits[gpu.index].watts:.0f} W" if gpu.index in limits else "")
        for gpu in gpus
    )
    version, why = driver_version()
    return {
        "dynaplan": __version__,
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "driver": version or f"none ({why})",
        "GPUs": "; ".join(shown) or "none",
        "machine": f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }
