"""What models cost that nobody asks for, and what it costs a frontend that its model is loaded on request.

Deployments run side by side, and each round measures all of them, so that a noisy moment meets all.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import uvloop

from tests.bench.deployments import INSTANT, idle_cpu_of_each, name_of, run_s, serving, tree
from tests.bench.load import generate
from tests.bench.table import Row
from tests.e2e.deployment import MODEL, Deployment

NUMBERS = (1, 50)
IDLE_S = 60.0
SETTLED_S = 30.0
"""Time after the start in which a deployment still does more than it will: seconds."""

CLIENTS = 16
REQUESTS = 1500
TOKENS = 32
ROUNDS = 3
"""Rounds of requests in each repetition of the idle minute."""

OPTIONS = "{engine: sim, memory: 50GB, speedup-ratio: 0, startup-time: 0, ttl: 0}"


def rows(repeats: int) -> Iterator[Row]:
    """Idle CPU with 1 and with 50 unloaded models, by process; frontend CPU per request of one model."""
    with ExitStack() as stack:
        running = {number: _with_models(stack, number) for number in NUMBERS}
        yield from _idle_rows(running, repeats)
    with ExitStack() as stack:
        of_models = _with_models(stack, 1)
        of_graph = stack.enter_context(
            serving("tests.bench.unplanned:Frontend", "graphs/agg.yaml", *INSTANT[:2])
        )
        yield from _request_rows({"loaded on request": of_models, "of a graph": of_graph}, ROUNDS * repeats)


def _with_models(stack: ExitStack, number: int) -> Deployment:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynaplan-bench-")))
    names = [MODEL, *(f"model-{each}" for each in range(1, number))]
    entries = "".join(f'  "{name}": {OPTIONS}\n' for name in names)
    (directory / "models.yaml").write_text(f"Models:\n{entries}")
    return stack.enter_context(serving(str(directory / "models.yaml"), "", "--gpus", "1"))


def _idle_rows(running: dict[int, Deployment], repeats: int) -> Iterator[Row]:
    processes = {
        number: {each.pid: name_of(each) for each in tree(found)} for number, found in running.items()
    }
    every = [psutil.Process(pid) for each in processes.values() for pid in each]
    idle_cpu_of_each(every, SETTLED_S)
    measured: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(repeats):
        used = idle_cpu_of_each(every, IDLE_S)
        for number, names in processes.items():
            for pid, name in names.items():
                measured[name, number].append(used[pid])
            measured["whole tree", number].append(sum(used[pid] for pid in names))
    for name, number in sorted(measured):
        models = "1 unloaded model" if number == 1 else f"{number} unloaded models"
        yield Row(f"idle CPU, {name}, {models}", "% of a core", measured[name, number])


def _request_rows(deployments: dict[str, Deployment], rounds: int) -> Iterator[Row]:
    pids = {name: each.pid_of("dynamo_Frontend") for name, each in deployments.items()}
    costs_ms: dict[str, list[float]] = defaultdict(list)
    for round_number in range(rounds + 1):
        for name, each in deployments.items():
            before_s = run_s(pids[name])
            result = uvloop.run(generate(each.url, MODEL, REQUESTS, CLIENTS, TOKENS))
            assert not result.failures, f"{result.failures} of {result.requests} failed"
            if round_number:  # the first one loads the model, and fills caches
                costs_ms[name].append(1000 * (run_s(pids[name]) - before_s) / REQUESTS)
    for name, values in costs_ms.items():
        yield Row(f"frontend CPU per request, a model {name}", "ms", values)
