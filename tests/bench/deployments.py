"""The deployments that the benchmarks run against: the end-to-end tests' own, with instant engines."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.deployment import Deployment

INSTANT = ("--VllmWorker.speedup-ratio=0", "--VllmWorker.startup-time=0", "--Planner.no-operation=true")
INSTANT_DISAGG = (*INSTANT, "--PrefillWorker.speedup-ratio=0", "--PrefillWorker.startup-time=0")


@contextmanager
def serving(graph: str, config: str, *options: str, wait: bool = True) -> Iterator[Deployment]:
    """A deployment for the length of the block."""
    with (
        tempfile.TemporaryDirectory(prefix="dynaplan-bench-") as directory,
        Deployment(Path(directory), graph, config, *options) as deployment,
    ):
        yield deployment.start() if wait else deployment.spawn()


def keep_bytecode() -> None:
    """Have the processes of deployments find the bytecode of what they import, as where pip has installed it.

    Where the environment forbids to write it, each start compiles sources: that is half of its CPU time.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with serving("graphs.disagg:Frontend", "disagg.yaml", *INSTANT_DISAGG):
        pass


def tree(deployment: Deployment) -> list[psutil.Process]:
    """``serve`` and everything below it."""
    assert deployment.process is not None
    parent = psutil.Process(deployment.process.pid)
    return [parent, *parent.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds that these processes have used, user and system."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def idle_cpu_percent(processes: list[psutil.Process], seconds: float = 10.0) -> float:
    """CPU use of all of them together, in percent of one core."""
    return sum(idle_cpu_of_each(processes, seconds).values())


def idle_cpu_of_each(processes: list[psutil.Process], seconds: float = 10.0) -> dict[int, float]:
    """CPU use by pid, in percent of one core, as the scheduler counts it: in nanoseconds, not in ticks."""
    before_s = {each.pid: run_s(each.pid) for each in processes}
    time.sleep(seconds)
    return {pid: 100.0 * (run_s(pid) - used_s) / seconds for pid, used_s in before_s.items()}


def run_s(pid: int) -> float:
    """The CPU time of a process, in seconds, as the scheduler counts it."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


MODULES = {
    "supervisor": "process.supervisor",
    "fork server": "process.fork_server",
    "connection keeper": "process.connection_keeper",
}
"""What a process is that runs such a module."""


def name_of(process: psutil.Process) -> str:
    """What a process of a deployment is: its service, ``etcd``, ``fork server``, ``serve`` ..."""
    words = process.cmdline()
    if "--service-name" in words:
        return words[words.index("--service-name") + 1]
    program = Path(words[0]).name
    if program in ("etcd", "nats-server"):
        return program
    for name, module in MODULES.items():
        if any(module in word for word in words):
            worker = process.name()  # of what is forked: a worker's name
            return worker if name == "fork server" and not worker.startswith("python") else name
    return "fleet plugin" if any("FleetPlugin" in word for word in words) else "serve"
