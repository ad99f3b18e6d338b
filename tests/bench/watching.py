"""What it costs a deployment to be watched: an open page, ``top``, a Prometheus that reads ``/metrics/all``.

The deployment has 9 workers on 8 simulated GPUs, as far as its table goes: a frontend, a planner, and 7 idle
engines. Each row is the CPU time of ``serve`` and all below it, less that of the same deployment unwatched,
which is measured before and after. The page is open in Chromium, whose own CPU time does not count.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread

from tests.bench.deployments import run_s, serving, tree
from tests.bench.table import Row
from tests.browser.page import CHROMIUM, DRIVER, Page, headless
from tests.e2e.deployment import Deployment, dynaplan
from tests.pictures.terminal import Terminal

ENGINES = 7
MEASURED_S, SETTLED_S, SCRAPED_S = 40.0, 12.0, 5.0
AIM_PERCENT = 1.0

Watching = Callable[[Deployment], AbstractContextManager[list[int]]]
"""Watches for the length of a block, which is given the processes that are not the deployment's."""


def rows(repeats: int) -> Iterator[Row]:
    watchers: dict[str, Watching] = {"`/metrics/all` every 5 s": scraped, "`top`": topped}
    if CHROMIUM and DRIVER:
        watchers["an open page"] = opened
    found: dict[str, list[float]] = {"unwatched": [], **{name: [] for name in watchers}}
    own: list[float] = []
    options = (f"--VllmWorker.ServiceArgs.workers={ENGINES}", "--Planner.no-operation=true")
    with serving("graphs.agg:Frontend", "agg.yaml", *options) as deployment:
        for _ in range(repeats):
            time.sleep(SETTLED_S)
            quiet = percents(deployment)
            for name, watching in watchers.items():
                with watching(deployment) as others:
                    time.sleep(SETTLED_S)
                    used, *watchers_used = percents(deployment, others)
                own += watchers_used
                time.sleep(2 * SETTLED_S)  # what serves the page ends 20 s after it
                quiet += percents(deployment)
                found[name].append(used - sum(quiet[-2:]) / 2)
            found["unwatched"] += quiet
    unit = "% of a core"
    yield Row("idle, with 9 workers", unit, found.pop("unwatched"))
    yield Row("`top` itself", unit, own, 3.0)
    for name, values in found.items():
        yield Row(f"more of the deployment: {name}", unit, values, AIM_PERCENT)


def percents(deployment: Deployment, others: Sequence[int] = ()) -> list[float]:
    """CPU use of the deployment, in percent of a core, and of each other process."""
    ours = {each.pid: run_s(each.pid) for each in tree(deployment)}
    theirs = {pid: run_s(pid) for pid in others}
    time.sleep(MEASURED_S)
    alive = {each.pid for each in tree(deployment)}
    used_s = [sum(run_s(pid) - ours.get(pid, 0.0) for pid in alive)]
    used_s += [run_s(pid) - before_s for pid, before_s in theirs.items()]
    return [100 * each / MEASURED_S for each in used_s]


@contextmanager
def topped(deployment: Deployment) -> Iterator[list[int]]:
    with Terminal([dynaplan(), "top"], deployment.environment, deployment.directory) as terminal:
        over = Event()

        def read() -> None:
            while not over.is_set():
                terminal.look(0.5)

        reader = Thread(target=read)
        reader.start()
        try:
            yield [terminal.pid]
        finally:
            over.set()
            reader.join()


@contextmanager
def scraped(deployment: Deployment) -> Iterator[list[int]]:
    script = (
        "import sys, time, urllib.request\n"
        "while True:\n"
        f"    urllib.request.urlopen(sys.argv[1]).read(); time.sleep({SCRAPED_S})"
    )
    url = f"{deployment.url}/metrics/all"
    urllib.request.urlopen(url).close()
    process = subprocess.Popen([sys.executable, "-c", script, url])
    try:
        yield []
    finally:
        process.kill()
        process.wait()


@contextmanager
def opened(deployment: Deployment) -> Iterator[list[int]]:
    with headless() as driver:
        Page(driver, deployment).open()
        yield []
