"""Cautions about a deployment in a cluster: what is there other than on this box, or is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dynaplan import wiring
from dynaplan.cli.exporting.sources import ExportSource
from dynaplan.core.manifests.exported import ExportedDeployment
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.domain.settings.worker import SIMULATED, engine_of
from dynaplan.domain.wire.discovery import host_of, is_loopback
from dynaplan.options.planner import settings_of
from dynaplan.options.service_config import section_options


def cautions(source: ExportSource, deployment: ExportedDeployment) -> list[str]:
    """Return a line for each thing that a user of the manifests should know before applying them."""
    found = [*_about_workers(source, deployment), *_about_requests(source, deployment)]
    return list(dict.fromkeys(found))


def _about_workers(source: ExportSource, deployment: ExportedDeployment) -> Iterator[str]:
    scaled = [each for each in source.spec.services if each.role in (Role.DECODE, Role.PREFILL)]
    for each in scaled:
        options = section_options(source.config, each.name)
        engine, model = engine_of(options), str(options.get("model") or "")
        if each.gpus != int(each.gpus):
            yield f"{each.name}: a pod gets a whole GPU in the place of {each.gpus:g}: Kubernetes shares none"
        is_mounted = any(model.startswith(volume.path.rstrip("/") + "/") for volume in deployment.volumes)
        if engine != SIMULATED and Path(model).is_absolute() and not is_mounted:
            yield (
                f"{each.name}: the model {model} is a path: the image must have it there, or a volume: "
                "--volume-claim CLAIM:/PATH"
            )
        if len(scaled) > 1 and engine != "vllm":
            yield (
                f"{each.name}: KV entries of {engine} do not move between pods: decode workers compute "
                "their prompts themselves. vLLM's move"
            )


def _about_requests(source: ExportSource, deployment: ExportedDeployment) -> Iterator[str]:
    frontend = deployment.of_role(Role.FRONTEND)
    if frontend and "DYNAPLAN_API_KEY" not in frontend.secrets:
        yield "no API key: whoever reaches the Service can use it; set DYNAPLAN_API_KEY to ask for a key"
    planner = source.spec.of_role(Role.PLANNER)
    if planner is None:
        yield "the graph has no planner: the numbers of workers stay as they are"
        return
    yield from _about_profile(planner.name, settings_of(section_options(source.config, planner.name)))
    endpoint = section_options(source.config, planner.name).get("prometheus-endpoint")
    if endpoint and is_loopback(host_of(str(endpoint))):
        yield f"{planner.name}.prometheus-endpoint is {endpoint}, which leads to the planner's own pod there"


def _about_profile(name: str, settings: PlannerSettings) -> Iterator[str]:
    """Yield that the planner will not find its profile, where this box does not have it either."""
    if settings.is_by_targets:
        try:
            wiring.planning.sla_model(settings, {})
        except ConfigError as error:
            yield f"{name}: unless its image has it, the planner ends at its start: {error.args[0]}"
