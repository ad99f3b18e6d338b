"""The deployment, trace and policies that ``dynaplan simulate`` compares; how a graph file describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaplan.config.overrides import sections_of
from dynaplan.config.parallelism import TENSOR, tensor_parallel_size
from dynaplan.config.service_config import SERVICE_ARGS, kebab_keys, section_options
from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT, DisaggregationSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.simulated_service import UNLIMITED_QUEUE
from dynaplan.util.errors import ConfigError

EVERY_PROMPT_REMOTE = DisaggregationSettings(is_on=True, max_prefill_queue_size=UNLIMITED_QUEUE)
"""The default: prefill workers compute every prompt, because one on a decode worker delays all its tokens."""


@dataclass(frozen=True)
class SimulateOptions:
    """One simulation for each of ``policies``, all of the same trace and deployment. Times are in seconds.

    ``trace`` is a file or made-up load, at ``rate_scale`` times its rate; of its arrivals only those of the
    last ``last_s`` count, where that is given. ``first`` are the workers at the beginning; without it there
    is one of each role, or the workers of a static policy.
    ``engine`` are options of the simulated engine, ``prefill_engine`` those of prefill workers where these
    differ, ``planner`` options of the planner. ``disaggregation`` counts only with prefill workers.
    The frontends refuse requests while ``max_waiting_requests`` wait for their first token, and give a
    remote prefill up after ``prefill_wait_s``.
    """

    trace: str
    policies: tuple[str, ...] = ("load",)
    gpus: int = 8
    is_disaggregated: bool = True
    startup_time_s: float = 60.0
    rate_scale: float = 1.0
    last_s: float | None = None
    slo: Slo = field(default_factory=Slo)
    first: PoolSizes | None = None
    routing: SimulatedRouting = field(default_factory=SimulatedRouting)
    seed: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    prefill_engine: Mapping[str, Any] | None = None
    disaggregation: DisaggregationSettings = EVERY_PROMPT_REMOTE
    max_waiting_requests: int | None = None
    prefill_wait_s: float | None = None

    def engine_of(self, role: Role) -> Mapping[str, Any]:
        is_own = role is Role.PREFILL and self.prefill_engine is not None
        return (self.prefill_engine or {}) if is_own else self.engine


SECTIONS = ("Planner", DECODE_COMPONENT, PREFILL_COMPONENT, "Frontend", "Router", "Processor")
Section = Mapping[str, Any]


@dataclass(frozen=True)
class SimulatedGraph:
    """Sections in kebab-case, with what they take from ``Common``.

    ``is_served`` says that a file holds the whole graph: what it leaves out is as ``dynaplan serve`` has it.
    Without one, every prompt is computed remotely, nobody is refused or gives up, and prefill workers are
    like decode workers but for what is said of them.
    """

    sections: Mapping[str, Section]
    service_args: Mapping[str, Section]
    is_served: bool

    def workers(self, name: str) -> int:
        """Return the number of a service's processes at the beginning."""
        return self._count(name, 1, "workers")

    def engines(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the engine options of decode workers and of prefill workers."""
        decode = self._engine(DECODE_COMPONENT)
        prefill = self._engine(PREFILL_COMPONENT)
        return decode, prefill if self.is_served and prefill else {**decode, **prefill}

    def routing(self) -> dict[str, Any]:
        """Return the options of a simulation that route: the router, disaggregation, the limits of
        waiting."""
        from dynaplan.config.frontend import SECTIONS as ROUTED_BY
        from dynaplan.config.frontend import read_settings

        sections = [(name, self.sections[name]) for name in ROUTED_BY]
        if not self.is_served:
            most = ("max-prefill-queue-size", "max-waiting-requests")
            sections.append(("", {"remote-prefill": True, **dict.fromkeys(most, UNLIMITED_QUEUE)}))
        settings = read_settings(sections, {})
        gives_up = self.is_served or any("prefill-wait" in section for _, section in sections)
        return {
            "routing": SimulatedRouting.of(settings),
            "disaggregation": settings.disaggregation,
            "prefill_wait_s": settings.prefill_wait_s if gives_up else None,
            "max_waiting_requests": settings.max_waiting_requests,
        }

    def _engine(self, name: str) -> dict[str, Any]:
        """Return a service's engine options, with the tensor parallel size that a worker's GPUs make."""
        options = dict(self.sections[name])
        gpus = self._count(name, 0, "resources", "gpu")
        if gpus > 1:
            options[TENSOR[0]] = tensor_parallel_size(options, gpus)
        return options

    def _count(self, name: str, least: int, *keys: str) -> int:
        """Return a number in the service's ``ServiceArgs``; 1 when it is absent, or for a share of a GPU.

        Raises ConfigError for one that is not whole, or below ``least``.
        """
        value: Any = self.service_args[name]
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None or (isinstance(value, float) and 0 < value < 1):
            return 1
        if isinstance(value, bool) or not str(value).isdecimal() or int(value) < least:
            where = ".".join((name, "ServiceArgs", *keys))
            raise ConfigError(f"{where}: {value!r}", hint=f"Expected a whole number, {least} or more.")
        return int(value)


def read_graph(file: Path | None, overrides: Sequence[str]) -> SimulatedGraph:
    """Read the graph of a file and of ``--Section.key=value``; raises ConfigError for an unreadable one."""
    from dynaplan.graph.config import read_config

    given = sections_of(overrides, SECTIONS)
    config = given if file is None else read_config(file, overrides)
    sections = {name: section_options(config, name) for name in SECTIONS}
    arguments = {name: kebab_keys(config.get(name) or {}).get(SERVICE_ARGS) or {} for name in SECTIONS}
    return SimulatedGraph(sections, arguments, is_served=file is not None)
