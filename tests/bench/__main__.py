"""``tox -e bench``: print the table. ``--repeats N`` (default 5); names of groups run only those."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator

import psutil

from tests.bench import (
    ablations,
    backtests,
    connections,
    data_path,
    decisions,
    events,
    frontends,
    hit_rate,
    imports,
    keys,
    kv_index,
    kv_routing,
    latency,
    learning,
    lifecycle,
    many_requests,
    memory,
    migration,
    planner,
    policies,
    profiling,
    records,
    replica_sync,
    rivals,
    routing,
    routing_memory,
    simulator,
    sla,
    stores,
    swaps,
    throughput,
    two_numbers,
    unloaded_models,
    watching,
    wrong_profiles,
)
from tests.bench.data_path import kv
from tests.bench.table import HEADER, Row, line

GROUPS: dict[str, Callable[[int], Iterator[Row]]] = {
    "planner": planner.rows,
    "keys": keys.rows,
    "lifecycle": lifecycle.rows,
    "throughput": throughput.rows,
    "data-path": data_path.rows,
    "data-path-kv": kv.rows,
    "frontends": frontends.rows,
    "latency": latency.rows,
    "connections": connections.rows,
    "idle": throughput.idle_rows,
    "imports": imports.rows,
    "simulator": simulator.rows,
    "sla": sla.rows,
    "policies": policies.rows,
    "decisions": decisions.rows,
    "ablations": ablations.rows,
    "backtests": backtests.rows,
    "events": events.rows,
    "memory": memory.rows,
    "many-requests": many_requests.rows,
    "migration": migration.rows,
    "learning": learning.rows,
    "profiling": profiling.rows,
    "kv-index": kv_index.rows,
    "kv-routing": kv_routing.rows,
    "hit-rate": hit_rate.rows,
    "replica-sync": replica_sync.rows,
    "records": records.rows,
    "rivals": rivals.rows,
    "routing": routing.rows,
    "routing-memory": routing_memory.rows,
    "stores": stores.rows,
    "swaps": swaps.rows,
    "two-numbers": two_numbers.rows,
    "unloaded-models": unloaded_models.rows,
    "watching": watching.rows,
    "wrong-profiles": wrong_profiles.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    memory_gib = psutil.virtual_memory().total / 2**30
    cores, version = psutil.cpu_count(), platform.python_version()
    print(f"{platform.machine()}, {cores} cores, {memory_gib:.0f} GiB, Python {version}\n")
    print(HEADER)
    for name in arguments.groups or GROUPS:
        for row in GROUPS[name](arguments.repeats):
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
