"""What the processes of a deployment import: what it costs, and of what they have called nothing.

A module is *called* when one of its functions is, after the imports, by the end of some requests and a few
seconds more. What is listed is where to look: a module may be used for its constants, or by what it does at
another one's import. What is forked has the modules of the fork server, whose memory it shares. The
supervisor, the keeper of connections and the shims run without ``site``, and so without a trace; they are
small.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench import import_trace
from tests.bench.deployments import INSTANT_DISAGG, keep_bytecode, name_of, serving, tree
from tests.bench.lifecycle import first_answer
from tests.bench.table import Row, matrix
from tests.fakes.polling import wait_until

REQUESTS = 5
QUIET_S = 5.0
"""Time after the requests in which each process does once what it does all the time."""

LEAST_MS, LEAST_MIB = 2.0, 0.5
"""What is listed costs as much of either."""


@dataclass(frozen=True)
class Trace:
    """What a process has imported, by module, and of what it has called something; see ``import_trace``."""

    costs: dict[str, tuple[float, float, str]]
    called: frozenset[str]

    def uncalled(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield what was imported for nothing that was called: a module, its importer, and all below it."""
        below: dict[str, list[str]] = defaultdict(list)
        for name, (_, _, importer) in self.costs.items():
            below[importer].append(name)

        def all_below(name: str) -> list[str]:
            return [name, *(each for child in below[name] for each in all_below(child))]

        def search(importer: str) -> Iterator[tuple[str, str, list[str]]]:
            for name in below[importer]:
                if self.called.isdisjoint(whole := all_below(name)):
                    yield name, importer, whole
                else:
                    yield from search(name)

        return search("")

    def cost(self, names: Iterable[str]) -> tuple[float, float]:
        """Return the milliseconds and the MiB of these modules."""
        every = [self.costs[name] for name in names]
        return sum(each[0] for each in every), sum(each[1] for each in every)


def rows(repeats: int) -> Iterator[Row]:
    """Every row of this group, by process; below them what costs most in the last run."""
    keep_bytecode()
    runs = [_traced() for _ in range(repeats)]
    for process in runs[-1]:
        traces = [run[process] for run in runs]
        yield Row(f"{process}: modules", "", [len(trace.costs) for trace in traces])
        yield Row(f"{process}: their imports", "ms", [trace.cost(trace.costs)[0] for trace in traces])
        yield Row(f"{process}: their imports", "MiB", [trace.cost(trace.costs)[1] for trace in traces])
        packages: dict[str, list[str]] = defaultdict(list)
        for name in traces[-1].costs:
            parts = name.split(".")
            packages[".".join(parts[: 2 if parts[0] == "dynaplan" else 1])].append(name)
        _show(traces[-1], "package", ((name, "", names) for name, names in packages.items()), 5.0)
        _show(traces[-1], "nothing called of", traces[-1].uncalled(), 1.0)


def _show(trace: Trace, what: str, found: Iterable[tuple[str, str, list[str]]], times: float) -> None:
    lines = [(*trace.cost(names), name, importer, names) for name, importer, names in found]
    large = [
        each
        for each in sorted(lines, reverse=True)
        if each[0] >= times * LEAST_MS or each[1] >= times * LEAST_MIB
    ]
    cells = [[name, str(len(names)), f"{ms:.1f}", f"{mib:.1f}", by] for ms, mib, name, by, names in large]
    print(matrix((what, "modules", "ms", "MiB", "imported by"), cells))


def _traced() -> dict[str, Trace]:
    """Serve some requests; return the trace of each process, by its name."""
    with tempfile.TemporaryDirectory(prefix="dynaplan-trace-") as directory:
        shutil.copy(import_trace.__file__, Path(directory, "sitecustomize.py"))
        os.environ["PYTHONPATH"] = directory
        try:
            with serving("graphs.disagg:Frontend", "disagg.yaml", *INSTANT_DISAGG) as deployment:
                for _ in range(REQUESTS):
                    asyncio.run(first_answer(deployment.url))
                time.sleep(QUIET_S)
                every = [each for each in tree(deployment) if _is_traced(each)]
                return {name_of(each): _trace_of(each.pid, Path(directory)) for each in every}
        finally:
            del os.environ["PYTHONPATH"]


def _is_traced(process: psutil.Process) -> bool:
    """Tell whether the process can be asked for its trace; Go's programs catch the signal, too."""
    caught = Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0]
    is_python = process.exe() == psutil.Process().exe()
    return is_python and bool(int(caught, 16) >> (signal.SIGUSR2 - 1) & 1)


def _trace_of(pid: int, directory: Path) -> Trace:
    path = directory / str(pid)
    os.kill(pid, signal.SIGUSR2)
    wait_until(path.exists)
    costs, called = marshal.loads(path.read_bytes())
    return Trace(costs, frozenset(called))
