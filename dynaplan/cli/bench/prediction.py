"""The simulation of a running deployment under the load that it is measured with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynaplan.cli.scaling.afterwards import planner_settings
from dynaplan.cli.scaling.counts import held_in
from dynaplan.cli.simulate import dispatched, origins, simulation_of
from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.graph.lifecycle import COUNTS, Role
from dynaplan.lab.simulate.options import SECTIONS, SimulatedGraph
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.lab.simulate.options import SimulateOptions
    from dynaplan.lab.simulate.simulation import Trace
    from dynaplan.simulation.run import ClosedLoop, Result

STATIC = "static"


@dataclass(frozen=True)
class Prediction:
    """The simulation that stands for a deployment; ``notes`` are sentences on what it is based on."""

    options: SimulateOptions
    notes: tuple[str, ...]

    def result(self, load: Trace | ClosedLoop) -> Result:
        """Return the result under that load."""
        from dynaplan.lab.simulate.simulation import run_load

        (result,) = run_load(self.options, load)
        return result


def predict(found: RunningDeployment, given: Mapping[str, Any]) -> Prediction:
    """Return the simulation of the deployment as it is now: same graph, profile, policy and workers.

    ``given`` are the options ``ttft``, ``itl``, ``seed`` and ``profile``. Raises ConfigError when there is
    nothing to simulate it by.
    """
    graph = graph_of(found)
    profile = given["profile"] or _profile(graph)
    prefill, decode = _present(found, Role.PREFILL), _present(found, Role.DECODE)
    is_disaggregated = any(worker.role is Role.PREFILL for worker in found.workers)
    start = f"{prefill},{decode}" if is_disaggregated else str(decode)
    policy = _policy(found)
    options = simulation_of(
        [policy if policy != STATIC else f"{STATIC}:{start}"],
        {
            **{name: given[name] for name in ("ttft", "itl", "seed")},
            "trace": "",
            "rate_scale": 1.0,
            "profile": profile,
            "gpus": _gpus(found),
            "mode": "disagg" if is_disaggregated else "agg",
            "startup_time": _startup_s(found),
            "start": start,
            "router": None,
            "kv_events": None,
        },
        graph,
    )
    workers = f"{prefill} prefill and {decode} decode workers" if is_disaggregated else f"{decode} workers"
    by = "no planner" if policy == STATIC else f"policy {policy}"
    first = f"simulated with {workers} at the beginning, {by}."
    return Prediction(options, (first, *origins(options), *dispatched(options)))


def graph_of(found: RunningDeployment) -> SimulatedGraph:
    """Return the deployment's merged configuration, its services under the names of the shipped graphs."""
    from dynaplan.config.service_config import (
        CONFIG_VARIABLE,
        SERVICE_ARGS,
        ServiceConfig,
        kebab_keys,
        section_options,
    )

    config = ServiceConfig.from_text(found.document["environment"].get(CONFIG_VARIABLE, ""))
    named = {name: name for name in SECTIONS}
    stock = {Role.PLANNER: "Planner", Role.DECODE: DECODE_COMPONENT, Role.PREFILL: PREFILL_COMPONENT}
    named |= {stock[worker.role]: worker.component for worker in found.workers if worker.role in stock}
    return SimulatedGraph(
        {name: section_options(config, own) for name, own in named.items()},
        {name: kebab_keys(config.get(own) or {}).get(SERVICE_ARGS) or {} for name, own in named.items()},
        is_served=True,
    )


def _profile(graph: SimulatedGraph) -> str | None:
    """Return the profile of a real engine, None for the simulated one's own; ConfigError without any."""
    engine = engine_of(graph.sections[DECODE_COMPONENT])
    if engine == SIMULATED:
        return None
    measured = graph.sections["Planner"].get("profile-results-dir")
    if not measured:
        raise ConfigError(
            f"nothing is predicted: there is no profile of this {engine}",
            hint="`dynaplan profile-sla` measures one; --profile names it.",
        )
    return str(measured)


def _policy(found: RunningDeployment) -> str:
    """Return the policy of the deployment's planner; static without one, or while something is held."""
    settings = planner_settings(found)
    return settings.policy if settings and not held_in(found.document).by_role else STATIC


def _present(found: RunningDeployment, role: Role) -> int:
    return sum(worker.role is role and worker.state in COUNTS for worker in found.workers)


def _gpus(found: RunningDeployment) -> int:
    """Return the GPUs of the deployment, no fewer than its workers hold."""
    from dynaplan.fleet.rules.statefile import inventory_of

    workers = [worker for worker in found.workers if worker.role in (Role.PREFILL, Role.DECODE)]
    return max(len(inventory_of(found.document)), sum(max(1, len(each.gpus)) for each in workers))


def _startup_s(found: RunningDeployment) -> float | None:
    """Return the longest usual start-up time of an engine in seconds; None when none was measured."""
    from dynaplan.cli.watching.gathering import usual_start_s

    engines = {each.name for each in found.workers if each.role in (Role.PREFILL, Role.DECODE)}
    known = [taken for name, taken in usual_start_s(found).items() if name in engines and taken is not None]
    return max(known, default=None)
