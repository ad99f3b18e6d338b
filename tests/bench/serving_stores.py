"""One key-value store beside the other: the start, the idle deployment, and a worker's death.

Each repetition measures every store once, so that a noisy moment meets all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from dynaplan.store import connections
from dynaplan.store.instances import SERVICES_PREFIX
from dynaplan.store.model import Deleted, Snapshot
from tests.bench.deployments import (
    INSTANT,
    idle_cpu_of_each,
    idle_cpu_percent,
    keep_bytecode,
    name_of,
    serving,
    tree,
)
from tests.bench.lifecycle import START, START_AIM_S, time_start
from tests.bench.table import Row
from tests.e2e.deployment import Deployment

STORES = ("file", "nats", "etcd")
WORKER = "dynamo_VllmWorker"
PLANNED = ("graphs.agg:Frontend", "agg.yaml", *INSTANT)
UNPLANNED = ("tests.bench.unplanned:Frontend", "graphs/agg.yaml", *INSTANT[:2])
SETTLED_S = 5.0
"""Time after the start in which a deployment still does more than it will: seconds."""


def rows(repeats: int) -> Iterator[Row]:
    """Every row of this group."""
    keep_bytecode()
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(repeats):
        for store in STORES:
            for name, value in _of_one(store).items():
                measured[name, store].append(value)
    for name in dict.fromkeys(name for name, _ in measured):
        unit, aim = QUANTITIES.get(name) or (_unit(name), None)
        for store in STORES:
            if measured.get((name, store)):
                yield Row(name, unit, measured[name, store], aim, note=f"--store {store}")


QUANTITIES = {
    START: ("s", START_AIM_S),
    "idle CPU, with a planner": ("% of a core", 0.5),
    "idle CPU, without": ("% of a core", 0.5),
    "idle memory, with a planner": ("MiB", 180.0),
    "a worker's death noticed": ("s", 0.2),
}
"""Row -> unit and aim; the rows of single processes have none."""


def _unit(name: str) -> str:
    if name.startswith(START):
        return "s"
    return "MiB" if "memory" in name else "% of a core"


def _of_one(store: str) -> dict[str, float]:
    started_s = time.perf_counter()
    with serving(*PLANNED, "--store", store, wait=False) as deployment:
        start = time_start(deployment, started_s)
        deployment.wait_ready()
        time.sleep(SETTLED_S)
        processes = tree(deployment)
        cpu = idle_cpu_of_each(processes)
        memory_mib = {each.pid: each.memory_full_info().pss / 2**20 for each in processes}
        names = {each.pid: name_of(each) for each in processes}
        death_s = asyncio.run(_death_noticed(deployment))
    return {
        **start,
        "idle CPU, with a planner": sum(cpu.values()),
        "idle CPU, without": _unplanned(store, lambda each: idle_cpu_percent(tree(each))),
        "idle memory, with a planner": sum(memory_mib.values()),
        "a worker's death noticed": death_s,
        **{f"idle CPU of {name}": cpu[pid] for pid, name in names.items()},
        **{f"idle memory of {name}": memory_mib[pid] for pid, name in names.items()},
    }


def _unplanned(store: str, measure: Callable[[Deployment], float]) -> float:
    with serving(*UNPLANNED, "--store", store) as deployment:
        time.sleep(SETTLED_S)
        return measure(deployment)


async def _death_noticed(deployment: Deployment) -> float:
    """From kill -9 of a worker to the end of its registration, in seconds."""
    store = connections.connect_store({**os.environ, **deployment.clients_environment()})
    try:
        events = store.watch(f"{SERVICES_PREFIX}dynamo/VllmWorker/")
        assert isinstance(await anext(events), Snapshot)
        os.kill(deployment.pid_of(WORKER), signal.SIGKILL)
        killed_s = time.perf_counter()
        while not isinstance(await anext(events), Deleted):
            pass
        return time.perf_counter() - killed_s
    finally:
        await store.close()
