"""Simulations from Python: ``dynaplan.simulate("bursts", ["load", "static:2"], mode="agg")``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dynaplan.cli.from_python.served import overrides_of

Result = TypeVar("Result")


def simulate(
    trace: str | Path,
    policies: Sequence[str] = (),
    *,
    config_file: str | None = None,
    options: Mapping[str, Any] | None = None,
    profile: str | None = None,
    gpus: int = 8,
    mode: str | None = None,
    startup_time: float | None = None,
    rate_scale: float = 1.0,
    ttft: float | None = None,
    itl: float | None = None,
    start: str | None = None,
    router: str | None = None,
    kv_events: bool | None = None,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Run policies on a trace in virtual time; return the rows of ``dynaplan simulate --json``.

    The parameters are the command's options; ``options`` are those of the graph's sections,
    ``{"Planner.adjustment-interval": 10}``. Raises ConfigError for wrong ones.
    """
    from dynaplan.cli.simulate import simulation_of
    from dynaplan.graph.config import find_config_file
    from dynaplan.graph.loading import shipped_graphs
    from dynaplan.lab.simulate.options import read_graph
    from dynaplan.lab.simulate.simulation import run_simulations
    from dynaplan.lab.simulate.table import rows

    file = find_config_file(config_file, Path.cwd(), beside=shipped_graphs()) if config_file else None
    graph = read_graph(file, overrides_of(options or {}))
    given = {
        "trace": str(trace),
        "profile": profile,
        "gpus": gpus,
        "mode": mode,
        "startup_time": startup_time,
        "rate_scale": rate_scale,
        "ttft": ttft,
        "itl": itl,
        "start": start,
        "router": router,
        "kv_events": kv_events,
        "seed": seed,
    }
    chosen = [policies] if isinstance(policies, str) else list(policies)
    asked = simulation_of(chosen or [str(graph.sections["Planner"].get("policy", "load"))], given, graph)
    return outside_loop(lambda: rows(list(run_simulations(asked))))


def outside_loop(work: Callable[[], Result]) -> Result:
    """Do the work where no event loop runs: it may run one of its own, which a notebook's does not allow."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
