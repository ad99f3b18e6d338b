"""``dynaplan reload`` of models that are loaded on request: one is changed, and no other touched.

The fleet plugin reads the new settings whenever it plans. So a model that was added can be loaded at once,
and the worker of one that was removed leaves by itself. A model that was changed is put away, after its
requests: the next request loads it with its new settings. The frontends, which know the models by name, are
replaced beside the old ones, and the planners' process by a new one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dynaplan.config.model_entries import components_of, planned_models, prefill_components_of
from dynaplan.config.overrides import MODELS, PLANNER, PREFILL
from dynaplan.config.service_config import COMMON, section_options
from dynaplan.config.settings.servers import has_no_nats
from dynaplan.contract.model_orders import change_order
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.config.overrides import Sections
    from dynaplan.graph.model import GraphSpec


@dataclass(frozen=True)
class ModelChanges:
    """The names of the models that were added, changed and removed, and what else was changed."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    planners: bool = False
    others: bool = False

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed or self.planners or self.others)

    @property
    def lines(self) -> list[str]:
        """Return a line for each model, and what becomes of it."""
        return [
            *(f"{name}: added; the first request loads it" for name in self.added),
            *(f"{name}: changed; it is put away, and the next request loads it" for name in self.changed),
            *(f"{name}: removed; it is put away" for name in self.removed),
            *(["planners: changed; their process is replaced"] if self.planners else []),
            *(["other sections: changed; the frontends are replaced"] if self.others else []),
        ]


def check_prefill_queue(graph: GraphSpec, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for prefill workers if the deployment has no NATS server to queue prompts."""
    services = [each for each in graph.services if each.role is Role.PREFILL]
    if services and has_no_nats(environ):
        raise ConfigError(
            f"{MODELS}.{services[0].model}.{PREFILL}: this deployment was started without a NATS server, on "
            "which prompts are queued",
            hint="`dynaplan stop`, then `dynaplan serve` again: it starts one.",
        )


def model_changes(before: Sections, after: Sections) -> ModelChanges:
    """Compare two configurations; raises ConfigError where a model's service would get another name."""
    old, new = (components_of(config.get(MODELS) or {}) for config in (before, after))
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ConfigError(
                f"{MODELS}.{name} would be the service {new[name]}, and is {old[name]}",
                hint="Two names look alike. Put them in the order that they had.",
            )
    changed = [name for name in new if name in old and _settings(before, name) != _settings(after, name)]
    return ModelChanges(
        tuple(name for name in new if name not in old),
        tuple(changed),
        tuple(name for name in old if name not in new),
        planned_models(before) != planned_models(after),
        _others(before) != _others(after),
    )


def _settings(config: Sections, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a model's entry without its planner's options, and the options of its workers by component."""
    entries = config.get(MODELS) or {}
    components = components_of(entries)[name], prefill_components_of(entries).get(name, "")
    workers = {
        component: {
            **section_options(config, component),
            "ServiceArgs": (config.get(component) or {}).get("ServiceArgs"),
        }
        for component in filter(None, components)
    }
    return {key: value for key, value in entries[name].items() if key != PLANNER}, workers


def _others(config: Sections) -> dict[str, Any]:
    entries = config.get(MODELS) or {}
    components = {*components_of(entries).values(), *prefill_components_of(entries).values()}
    apart = components | {MODELS, PLANNER, COMMON}
    return {name: each for name, each in config.items() if name not in apart}


async def put_away(store: Any, namespace: str, names: tuple[str, ...]) -> None:
    """Have these models unloaded after their requests, and print each; a waiting request reloads it."""

    for name in names:
        await change_order(store, namespace, name, {"unload_unix_s": time.time()})
        click.echo(f"{name} is put away")
