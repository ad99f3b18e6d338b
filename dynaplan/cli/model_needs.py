"""What models that are loaded on request need, and which of them this machine can never load.

``doctor``, ``serve`` and ``--dry-run`` say it in the same words.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynaplan.config.command_words import COMMAND, read_command, recognise
from dynaplan.config.model_entries import models_together, served_models
from dynaplan.config.service_config import section_options
from dynaplan.contract.gpus import UNREADABLE, GpuUse, is_unreadable
from dynaplan.fleet.gpu_devices import available_gpus, uses_reader
from dynaplan.fleet.plugin.host_memory import read_host_memory
from dynaplan.graph.model import GraphSpec
from dynaplan.models.gpu_words import chosen_gpus
from dynaplan.models.model import Constraints, Device, ModelStatus
from dynaplan.models.policies import is_memory_known, model_constraints, model_policy
from dynaplan.models.rules.eviction import choose
from dynaplan.models.rules.memory import Need, chosen_place, free_bytes, need
from dynaplan.models.shared_memory import SharedMemory
from dynaplan.util.amounts import gib
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class ModelNeeds:
    """What the models of a deployment need, and the memory that they share, as it is now.

    ``unknown`` are those of which nothing is known before their first load; ``notes`` say where the owner's
    words choose GPUs or a file that are not there.
    """

    needs: Sequence[Need]
    devices: Sequence[Device]
    constraints: Constraints
    unknown: Container[str] = ()
    notes: tuple[str, ...] = ()


def model_needs(
    graph: GraphSpec, config: Mapping[str, Mapping[str, Any]], gpus: int | None, budget_bytes: int
) -> ModelNeeds:
    """Return what the models of the configuration need; ``gpus`` and the budget are the options of serve."""
    models, (inventory, _) = served_models(config), available_gpus(gpus)
    policies, unknown, notes = {}, set(), []
    for each in models:
        options, service = section_options(config, each.component), graph.service(each.component)
        asked, environment = (service.gpus, service.envs) if service else (0, {})
        policies[each.name] = model_policy(each.settings, options, asked, inventory, environment)
        if absent := absent_file(options):
            why = "; no shell replaces ~ there, so write the whole path" if absent.startswith("~") else ""
            notes.append(f"{each.name}: its command names the file {absent}, which is not there{why}")
        elif not is_memory_known(each.settings, options, asked):
            unknown.add(each.name)
        if missing := chosen_gpus(options, environment, inventory).missing:
            notes.append(f"{each.name}: {missing}; its memory is not counted there")
    uses = uses_reader(inventory)()
    shared = [
        (gpu, uses.get(gpu.index, GpuUse()), UNREADABLE if is_unreadable(gpu, uses) else "")
        for gpu in inventory
    ]
    host = None if all(each.devices for each in policies.values()) else read_host_memory(())
    devices = SharedMemory().follow((), shared, host, 0.0, budget_bytes=budget_bytes).devices
    return ModelNeeds(
        [need(policy, ModelStatus(name), devices) for name, policy in policies.items()],
        devices,
        model_constraints(models, models_together(config)),
        unknown,
        tuple(notes),
    )


def absent_file(options: Mapping[str, Any]) -> str:
    """Return the model's file that a llama-server's command names and that is not there; else nothing.

    It is read as the program will get it: a ``~`` is a shell's word.
    """
    command = recognise(read_command(options.get(COMMAND)).words)
    file = command.flags.get("model", "") if command and command.engine == "llamacpp" else ""
    return "" if not isinstance(file, str) or os.path.exists(file) else file


def check_never_loaded(found: ModelNeeds) -> list[str]:
    """Return a warning for each model that can never be loaded here; raises ConfigError where none can."""
    empty = [replace(each, foreign_bytes=0) for each in found.devices]
    never = [each for each in found.needs if not choose(each, empty, {}, ())]
    said = [(each.model, *why_without_room(each, empty)) for each in never]
    if said and len(said) == len(found.needs):
        model, says, advice = said[0]
        raise ConfigError(f"model {model}: {says}", hint=advice)
    return [*found.notes, *(f"model {model}: {says}. {advice}" for model, says, advice in said)]


def chosen_places(found: ModelNeeds) -> list[str]:
    """Return a line for each model whose GPUs its owner has chosen: ``big: on GPU 0 (--gpus device=0)``."""
    lines = []
    for each in (wanted for wanted in found.needs if wanted.chosen_by):
        if each.allowed or not each.devices:
            place = chosen_place(each, sorted(each.allowed))
        else:
            number = "1 GPU" if each.devices == 1 else f"{each.devices} GPUs"
            place = f" on {number} ({each.chosen_by})"
        lines.append(f"{each.model}:{place}")
    return lines


def why_without_room(need: Need, devices: Sequence[Device]) -> tuple[str, str]:
    """Return why a model does not fit alone, now or ever, and what to do."""
    where = [each for each in devices if need.may_have(each)]
    chosen = f" ({need.chosen_by})" if need.chosen_by else ""
    each_of = f" on each of {need.devices} GPUs" if need.devices > 1 else ""
    needs = f"it needs {gib(need.bytes_each)}{each_of}{chosen}"
    largest = max((each.total_bytes for each in where), default=0)
    if choose(need, [replace(each, foreign_bytes=0) for each in where], {}, ()):
        free = max(free_bytes(each, {}) for each in where)
        says = f"{needs}, and {gib(free)} are free: other programs hold the rest of {gib(largest)}"
        return says, "Nothing is killed for it: it is loaded when they have ended."
    if len(where) < need.places:
        advice = f"Give it fewer GPUs: Models: {{{need.model}: {{resources: {{gpu: {len(where)}}}}}}}."
        if chosen:
            advice = "Change these words, or let serve use more GPUs (CUDA_VISIBLE_DEVICES, --gpus)."
        return f"it asks for {need.devices} GPUs{chosen}, and there are {len(where)}", advice
    owner = "the largest GPU" if need.devices else "this machine"
    return (
        f"{needs}, and {owner} has {gib(largest)}: never loaded",
        "Take a smaller max-model-len, a kv-cache-dtype of 8 bits, a smaller quantisation or more GPUs "
        f"(resources); where the estimate is wrong say it: Models: {{{need.model}: {{memory: ...}}}}.",
    )
