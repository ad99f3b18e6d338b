"""Ctrl-C and kill -9 of ``serve`` when it suits least: nothing is left, and the next one starts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from dynaplan.fleet.shutdown import AFTER_KILL_S, CLEAN_UP_S
from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.held import serve_of
from tests.e2e.test_kills import is_whole, process_of
from tests.e2e.traces import files_of, in_torture, processes_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually, wait_until

DRAIN_S = 2.0
COMPUTING_S = 10.0
"""What ending its processes takes beside all waits, where other programs want both cores as well."""

LONGEST_S = DRAIN_S + CLEAN_UP_S + AFTER_KILL_S + COMPUTING_S
"""All that ``serve`` ever waits for after Ctrl-C: a stream that it let finish would take minutes."""

OPTIONS = ("--Planner.no-operation=true", "--drain-timeout", f"{DRAIN_S:g}")
AGGREGATED = ("graphs.agg:Frontend", "agg.yaml", "--VllmWorker.remote-prefill=true", *OPTIONS)
"""With the prefill queue, though without workers for it: so NATS runs."""

WORKER = "dynamo_VllmWorker"

STUBBORN_GRAPH = """
import signal, time
from pathlib import Path
from dynaplan.sdk import async_on_start, depends, endpoint, service

@service
class Deaf:
    @async_on_start
    async def begin(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @endpoint()
    async def generate(self, request: str):
        yield request

@service
class Blocking:
    deaf = depends(Deaf)

    @async_on_start
    async def begin(self):
        import asyncio
        asyncio.get_running_loop().call_later(1.0, self.block)

    def block(self):
        Path(__file__).with_name("blocks").touch()
        time.sleep(600)

    @endpoint()
    async def generate(self, request: str):
        yield request
"""


def ctrl_c(deployment: Deployment) -> tuple[int, float]:
    """The exit code, and how long that took, in seconds."""
    begun_s = time.monotonic()
    code = deployment.stop(30)
    return code, time.monotonic() - begun_s


def nothing_is_left(deployment: Deployment) -> None:
    assert processes_of(deployment) == {}
    assert files_of(deployment) == []


async def during_scale_up(deployment: Deployment) -> None:
    await asyncio.to_thread(deployment.run, "scale", "decode=5", "--no-wait")
    await eventually(lambda: len(deployment.workers("VllmWorker")) > 1, 10, 0.005)


async def during_back_off(deployment: Deployment) -> None:
    for _ in range(6):
        worker = deployment.workers()[WORKER]
        if worker["pid"]:
            with suppress(ProcessLookupError):
                os.kill(worker["pid"], signal.SIGKILL)
        pid = worker["pid"]
        await eventually(lambda pid=pid: deployment.workers()[WORKER]["pid"] != pid, 20, 0.01)
        if deployment.workers()[WORKER]["state"] == "backoff":
            return
        await eventually(lambda: deployment.workers()[WORKER]["pid"], 20, 0.01)
    raise AssertionError("never in back-off")


async def during_a_drain(deployment: Deployment) -> None:
    """Of two decode workers one is to go; both hold streams that last longer than anybody waits."""
    await asyncio.to_thread(deployment.scale, decode=2)
    await _begin_endless_streams(deployment)
    await asyncio.to_thread(deployment.run, "scale", "decode=1", "--no-wait")
    await eventually(lambda: "draining" in states(deployment), interval_s=0.01)


async def with_etcd_stopped(deployment: Deployment) -> None:
    process_of(deployment, "etcd --name").suspend()


async def with_nats_stopped(deployment: Deployment) -> None:
    process_of(deployment, "nats-server").suspend()


async def with_the_plugin_stopped(deployment: Deployment) -> None:
    process_of(deployment, "FleetPlugin").suspend()


async def with_serve_stopped(deployment: Deployment) -> None:
    (await eventually(lambda: serve_of(deployment))).suspend()


async def with_etcd_stopped_and_a_worker_starting(deployment: Deployment) -> None:
    await during_scale_up(deployment)
    process_of(deployment, "etcd --name").suspend()


Moment = Callable[[Deployment], Awaitable[None]]
SELDOM = (
    during_scale_up,
    during_back_off,
    with_etcd_stopped,
    with_nats_stopped,
    with_the_plugin_stopped,
    with_serve_stopped,
)


def states(deployment: Deployment) -> list[str]:
    return [worker["state"] for worker in deployment.workers().values()]


async def _begin_endless_streams(deployment: Deployment) -> None:
    """One after another, until every decode worker has one; they go on until the deployment has ended."""
    deployment.loads = []  # type: ignore[attr-defined]

    async def has_each_one() -> bool:
        running = [await _running(worker["url"]) for worker in deployment.workers("VllmWorker").values()]
        if all(running):
            return True
        load = await Load(deployment.url, MODEL, clients=1, tokens=8000).__aenter__()
        await asyncio.sleep(0)  # until its client has begun a request, its only one
        load.send_no_more()
        deployment.loads.append(load)  # type: ignore[attr-defined]
        return False

    await eventually(has_each_one, interval_s=0.3)


async def _running(url: str) -> int:
    """The requests that the worker at that address computes now."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/load_metrics") as response:
        return int((await response.json())["worker_stats"]["request_active_slots"])


@pytest.mark.parametrize(
    "moment",
    [
        during_a_drain,
        pytest.param(with_etcd_stopped_and_a_worker_starting, marks=pytest.mark.slow),
        *(pytest.param(each, marks=in_torture) for each in SELDOM),
    ],
)
async def test_ctrl_c_ends_it_within_the_deadline_and_leaves_nothing(
    deploy: Callable[..., Deployment], moment: Moment
) -> None:
    deployment = await asyncio.to_thread(deploy, *AGGREGATED)
    await moment(deployment)
    code, took_s = await asyncio.to_thread(ctrl_c, deployment)
    await _end_of_load(deployment)
    assert code == 0, deployment.text
    assert took_s < LONGEST_S
    nothing_is_left(deployment)


@pytest.mark.parametrize(
    "moment",
    [
        during_a_drain,
        *(
            pytest.param(each, marks=in_torture)
            for each in (with_etcd_stopped_and_a_worker_starting, *SELDOM)
        ),
    ],
)
async def test_kill_9_leaves_no_process_and_the_next_serve_starts(
    deploy: Callable[..., Deployment], moment: Moment
) -> None:
    deployment = await asyncio.to_thread(deploy, *AGGREGATED)
    await moment(deployment)
    assert deployment.process
    deployment.process.kill()
    deployment.process.wait()
    await eventually(lambda: processes_of(deployment) == {}, 5)
    await _end_of_load(deployment)
    await asyncio.to_thread(deployment.start)
    assert is_whole(deployment)
    assert len(deployment.workers("VllmWorker")) == 1
    code, _ = await asyncio.to_thread(ctrl_c, deployment)
    assert code == 0, deployment.text
    nothing_is_left(deployment)


async def _end_of_load(deployment: Deployment) -> None:
    for load in getattr(deployment, "loads", ()):
        await load.stop()


@pytest.mark.parametrize(
    "seconds",
    [
        0.3,
        pytest.param(1.0, marks=pytest.mark.slow),
        *(pytest.param(each, marks=in_torture) for each in (0.0, 0.03, 0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 1.5)),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_may_be_ended_while_it_starts(
    deploy: Callable[..., Deployment], seconds: float, number: signal.Signals
) -> None:
    deployment = deploy(*AGGREGATED, wait=False)
    assert deployment.process
    time.sleep(seconds)
    has_begun = has_run_its_first_line(deployment.process.pid)
    deployment.process.send_signal(number)
    code = deployment.process.wait(LONGEST_S)
    if number == signal.SIGKILL:
        wait_until(lambda: processes_of(deployment) == {}, 5)
        return
    if has_begun:  # else Python itself is starting, and ends in its own way, with a traceback of its modules
        expected = (0,) if "dynaplan serve (Ctrl-C" in deployment.text else (0, 130, 143, -number)
        assert code in expected, deployment.text
        assert "Traceback" not in deployment.text
    nothing_is_left(deployment)


def has_run_its_first_line(pid: int) -> bool:
    """Tell whether ``serve`` handles SIGHUP, which it does first of all."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) & 1 << (signal.SIGHUP - 1))


@pytest.mark.slow
def test_a_closed_terminal_does_not_end_a_serve_that_is_still_being_imported(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy(*AGGREGATED, wait=False)
    process = deployment.process
    assert process
    wait_until(lambda: has_run_its_first_line(process.pid), 30, 0.001)

    def has_greeted_though_it_is_told_of_a_closed_terminal() -> bool:
        process.send_signal(signal.SIGHUP)
        return "dynaplan serve (Ctrl-C" in deployment.text or process.poll() is not None

    wait_until(has_greeted_though_it_is_told_of_a_closed_terminal, 60, 0.01)
    deployment.wait_ready()
    assert ctrl_c(deployment)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ended_while_it_still_prepares_it_gives_back_what_it_took(
    deploy: Callable[..., Deployment], number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        deployment = deploy(*AGGREGATED, wait=False, environment={"ETCD_ENDPOINTS": endpoint})
        connection, _ = silent.accept()
        assert files_of(deployment) != []
        assert deployment.process
        deployment.process.send_signal(number)
        assert deployment.process.wait(5) == 130
        connection.close()
    assert "Traceback" not in deployment.text
    nothing_is_left(deployment)


def test_workers_that_ignore_sigterm_or_block_cannot_hold_up_the_exit(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    graph = tmp_path / "stubborn.py"
    graph.write_text(STUBBORN_GRAPH)
    deployment = deploy("stubborn:Blocking", "", *OPTIONS[1:], "--working-dir", str(tmp_path))
    wait_until((tmp_path / "blocks").exists)
    stubborn = [psutil.Process(worker["pid"]) for worker in deployment.workers().values()]
    code, took_s = ctrl_c(deployment)
    assert len(stubborn) == 2
    assert code == 0, deployment.text
    assert took_s < LONGEST_S
    assert "killed: " in deployment.text
    nothing_is_left(deployment)
