"""Scaling up and down again and again leaves no open file and no memory behind in those that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import serve_of
from tests.e2e.test_kills import is_whole, process_of
from tests.e2e.traces import IS_TORTURE, in_torture
from tests.fakes.polling import wait_until

EVENTS = 50 if IS_TORTURE else 6
WARM_UP_EVENTS = 2
MORE_FILES = 2
"""A connection that happens to be open; one left per event would be three times as many in the short run."""

MORE_BYTES = 2 * 2**20
SOON_S = 10.0


@in_torture
@pytest.mark.timeout(300)
def test_scaling_leaves_no_files_open_and_no_memory_taken(deploy: Callable[..., Deployment]) -> None:
    quiet = "--Planner.no-operation=true"
    deployment = deploy("graphs.disagg:Frontend", "disagg.yaml", quiet, "--gpus", "4")
    serve = serve_of(deployment)
    assert deployment.process and serve
    stay = {
        "supervisor": psutil.Process(deployment.process.pid),
        "serve": serve,
        "plugin": process_of(deployment, "FleetPlugin"),
        "frontend": process_of(deployment, "--service-name Frontend"),
        "planner": process_of(deployment, "--service-name Planner"),
        "decode worker": process_of(deployment, "--service-name VllmWorker"),
    }
    scale_up_and_down(deployment, WARM_UP_EVENTS)
    with each_is_as_before(stay):
        scale_up_and_down(deployment, EVENTS)
    assert is_whole(deployment)
    assert len(deployment.workers()) == 4
    assert all(process.is_running() for process in stay.values())


def scale_up_and_down(deployment: Deployment, events: int) -> None:
    for event in range(events // 2):
        role = "decode" if event % 2 else "prefill"
        deployment.scale(**{role: 2})
        deployment.scale(**{role: 1})
    wait_until(lambda: is_whole(deployment) and len(deployment.workers()) == 4, 20)


def has_files(process: psutil.Process, most: int) -> bool:
    return process.num_fds() <= most


@contextmanager
def each_is_as_before(processes: dict[str, psutil.Process]) -> Iterator[None]:
    files = {name: process.num_fds() for name, process in processes.items()}
    memory = {name: process.memory_full_info().uss for name, process in processes.items()}
    yield
    for name, process in processes.items():
        wait_until(partial(has_files, process, files[name] + MORE_FILES), SOON_S)
        more = process.memory_full_info().uss - memory[name]
        print(f"{name}: files {files[name]} -> {process.num_fds()}, memory {memory[name]} {more:+} bytes")
        assert more < MORE_BYTES, f"{name} has grown by {more} bytes"
