"""``dynaplan simulate --models``: several models on one box, who is loaded, who waits, and for how long."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dynaplan.config.model_entries import models_together, served_models, with_worker_sections
from dynaplan.config.overrides import Sections
from dynaplan.config.planner import gpus_of_worker
from dynaplan.contract.gpus import Gpu
from dynaplan.models.model import NO_CONSTRAINTS, Constraints, Device, ModelPolicy, ModelStatus
from dynaplan.models.policies import is_memory_known, model_constraints, model_policy
from dynaplan.models.rules.memory import load_s
from dynaplan.simulation.many_models.box import SimulatedModel
from dynaplan.simulation.many_models.call_chains import (
    KINDS,
    Chain,
    chains_of,
    is_made_up,
    length_s,
    made_up,
)
from dynaplan.simulation.many_models.comparison import BoxOutcome, compare
from dynaplan.simulation.traces.reading import read_trace
from dynaplan.util.errors import ConfigError

_MODEL = re.compile(r"(?:(?P<name>[^=@,]+)=)?(?P<gb>\d+(?:\.\d+)?)(?:@(?P<load_s>\d+(?:\.\d+)?))?")

COLUMNS: Mapping[str, tuple[str, str]] = {
    "policy": ("POLICY", "{}"),
    "in_time": ("IN TIME", "{:.1%}"),
    "hits": ("READY", "{:.1%}"),
    "wait_p50_s": ("WAIT p50", "{:.1f} s"),
    "wait_p95_s": ("p95", "{:.1f} s"),
    "wait_longest_s": ("LONGEST", "{:.1f} s"),
    "swaps_per_hour": ("SWAPS/h", "{:.0f}"),
    "gpu_hours": ("GPU-HOURS", "{:.2f}"),
    "requests": ("REQUESTS", "{}"),
    "lost": ("LOST", "{}"),
}


@dataclass(frozen=True)
class ManyModels:
    """What is simulated: the load, the models by name, and GPUs that are alike."""

    trace: str
    models: Mapping[str, SimulatedModel]
    gpus: int
    gpu_memory_bytes: int
    seed: int = 1
    constraints: Constraints = NO_CONSTRAINTS


def read_models(text: str) -> dict[str, SimulatedModel]:
    """Read models from ``20,13@40,e5=1``: GB of memory each, ``NAME=`` before, ``@SECONDS`` of a load behind.

    Raises ConfigError for another text.
    """
    models: dict[str, SimulatedModel] = {}
    for index, part in enumerate(text.split(","), 1):
        found = _MODEL.fullmatch(part.strip())
        name = (found["name"] or f"m{index}").strip() if found else ""
        if found is None or not float(found["gb"]) or name in models:
            raise ConfigError(
                f"--models: {part.strip()!r} of {text!r}",
                hint="Expected GB, NAME=GB, or NAME=GB@SECONDS of a load, each name once: 20,e5=1@3.",
            )
        settings = ModelPolicy(
            claim_bytes=int(float(found["gb"]) * 10**9), estimate_load_s=float(found["load_s"] or 0)
        )
        models[name] = SimulatedModel(settings, load_s(settings, ModelStatus(name)))
    return models


def models_of(config: Sections, gpu_memory_bytes: int) -> dict[str, SimulatedModel]:
    """Return the models of a deployment's section ``Models``; none where it has none.

    They are on GPUs, whatever their engine, with room in the host's memory for all that sleep. A load takes
    its ``startup-time``, else a second a GB. Raises ConfigError for a model whose memory is neither stated
    nor in its files.
    """
    sections, gpu = with_worker_sections(config), Gpu(0, "GPU-0", memory_bytes=gpu_memory_bytes)
    models = {}
    for served in served_models(config):
        own, options = served.settings, sections[served.component]
        gpus = gpus_of_worker(sections, served.component)
        if not is_memory_known(own, options, gpus):
            raise ConfigError(
                f"Models.{served.name}: how much memory it takes is not known here",
                hint=f"Say it: Models: {{{served.name}: {{memory: 13GB}}}}.",
            )
        policy = model_policy(own, options, gpus, [gpu])
        policy = replace(
            policy,
            devices=max(1, policy.devices),
            claim_bytes=policy.claim_bytes or policy.estimate_bytes,
            estimate_load_s=float(options.get("startup-time") or 0),
            sleep_levels=tuple(replace(each, host_bytes=0) for each in policy.sleep_levels),
        )
        models[served.name] = SimulatedModel(policy, load_s(policy, ModelStatus(served.name)))
    return models


def constraints_of(config: Sections) -> Constraints:
    """Return which models may be loaded at once by the owner's word, beside memory."""
    return model_constraints(served_models(config), models_together(config))


def run_comparison(options: ManyModels) -> list[BoxOutcome]:
    """Run the load under the rules of a deployment, and with a GPU for each model.

    Raises ConfigError for an invalid load, or one that is for other models.
    """
    devices = [Device(index, options.gpu_memory_bytes) for index in range(options.gpus)]
    chains, duration_s = load_of(options)
    return compare(chains, options.models, devices, duration_s, constraints=options.constraints)


def load_of(options: ManyModels) -> tuple[Callable[[], Iterable[Chain]], float]:
    """Return what creates the load, anew for each policy, and the load's duration in s.

    Raises ConfigError for what is neither a file nor a made-up load.
    """
    names = list(options.models)
    if is_made_up(options.trace):
        return lambda: made_up(options.trace, names, options.seed), length_s(options.trace)
    path = Path(options.trace)
    if not path.exists():
        raise ConfigError(
            f"--trace: {options.trace!r} is no file, and no load on several models",
            hint=f"Expected a trace whose requests name their model, or {', '.join(KINDS)}.",
        )
    requests = list(read_trace(path))
    return lambda: chains_of(requests, names), requests[-1].arrival_s if requests else 0.0


def rows(outcomes: Iterable[BoxOutcome]) -> list[dict[str, Any]]:
    return [asdict(each) for each in outcomes]


NOTES = (
    "IN TIME: TTFT at most twice that of a ready model; READY: found its model ready; waits are for a model.",
    "own-gpu has a GPU for each model; with dynaplan they share the memory that there is.",
)
