"""kill -9 of ``serve``: no request notices, and it is back by itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.e2e.deployment import EXECUTED, MODEL, REPOSITORY, Deployment, dynaplan
from tests.e2e.held import environment_of, serve_of
from tests.e2e.test_kills import is_whole
from tests.e2e.traces import files_of, in_torture, processes_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually

pytestmark = in_torture

KILLS = int(os.environ.get("DYNAPLAN_KILLS", "5"))
QUIET = ("--Planner.no-operation=true",)


def starts(deployment: Deployment) -> dict[str, tuple[int, int]]:
    return {name: (each["pid"], each["started_at"]) for name, each in deployment.workers().items()}


def owners(deployment: Deployment) -> dict[str, set[str]]:
    """The workers that have each GPU, by the environment of the processes that run."""
    found: dict[str, set[str]] = {}
    for pid in processes_of(deployment):
        environment = environment_of(pid)
        for gpu in filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")):
            found.setdefault(gpu, set()).add(environment["DYNAPLAN_WORKER_NAME"])
    return found


async def killed(deployment: Deployment) -> float:
    """Kill ``serve``; return, when the next one is ready, after which seconds it had adopted what runs."""
    old, adoptions = await eventually(lambda: serve_of(deployment)), deployment.text.count("Adopted")
    begun_s = time.monotonic()
    old.kill()
    await eventually(lambda: deployment.text.count("Adopted") > adoptions, interval_s=0.01)
    took_s = time.monotonic() - begun_s
    # One that is killed before it is back is taken for one that cannot come back, and waited with.
    await eventually(lambda: "Ready after" in deployment.text.rpartition("Adopted")[2])
    return took_s


async def ended(deployment: Deployment) -> None:
    """End it in order: nothing is left."""
    assert await asyncio.to_thread(deployment.stop) == 0
    await eventually(lambda: not processes_of(deployment))
    assert files_of(deployment) == []


@pytest.mark.timeout(120 + 20 * KILLS)
async def test_no_request_notices_that_serve_is_killed(deploy: Callable[..., Deployment]) -> None:
    arguments = ("graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    deployment = await asyncio.to_thread(deploy, *arguments, environment=EXECUTED)
    before, took_s, busy = starts(deployment), [], []
    async with Load(deployment.url, MODEL, clients=40, tokens=200) as load:
        for _ in range(KILLS):
            await eventually(load.streams)
            took_s.append(await killed(deployment))
            busy.append(os.getloadavg()[0])
            assert all(len(names) == 1 for names in owners(deployment).values())
        await load.stop()
    took_s.sort()
    print(
        f"{KILLS} kills: adopted after {took_s[0]:.2f}, {took_s[KILLS // 2]:.2f}, {took_s[-1]:.2f} s (least, "
        f"median, most); {len(load.outcomes)} requests, {len(load.incomplete)} failed; load average "
        f"{min(busy):.1f} to {max(busy):.1f}"
    )
    assert load.incomplete == []
    assert starts(deployment) == before
    assert len(owners(deployment)) == 2
    assert deployment.text.count("Adopted 7 processes") == KILLS
    assert is_whole(deployment)
    await ended(deployment)


@pytest.mark.timeout(120 + 20 * KILLS)
async def test_no_gpu_has_two_owners_when_serve_is_killed_amid_scaling(
    deploy: Callable[..., Deployment],
) -> None:
    options = (*QUIET, "--gpus", "5", "--VllmWorker.startup-time=0.3")
    arguments = ("graphs.disagg:Frontend", "disagg.yaml", *options)
    deployment = await asyncio.to_thread(deploy, *arguments, environment=EXECUTED)
    dice = random.Random(KILLS)
    async with Load(deployment.url, MODEL, clients=8, tokens=100) as load:
        for number in range(KILLS):
            counts = (f"decode={3 - 2 * (number % 2)}", f"prefill={dice.randint(1, 2)}", "--no-wait")
            told = await asyncio.to_thread(deployment.run, "scale", *counts)
            assert told.returncode == 0, told.stderr
            await asyncio.sleep(dice.uniform(0.0, 0.8))
            await killed(deployment)
            assert all(len(names) == 1 for names in owners(deployment).values())
        await asyncio.to_thread(deployment.scale, decode=1, prefill=1)
        await load.stop()
    assert load.incomplete == []
    assert is_whole(deployment)
    await ended(deployment)


async def test_what_was_adopted_is_scaled_restarted_and_shown_like_any_other(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    before = starts(deployment)
    os.kill(serve_of(deployment).pid, signal.SIGKILL)  # type: ignore[union-attr]
    await eventually(lambda: "Adopted 7" in deployment.text and serve_of(deployment))
    await asyncio.to_thread(deployment.scale, decode=2)
    victim, _ = before["dynamo_PrefillWorker"]
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: is_whole(deployment) and starts(deployment)["dynamo_PrefillWorker"][0] != victim)
    status = await asyncio.to_thread(deployment.run, "status")
    assert "ready prefill 1 of 1, decode 2 of 2" in status.stdout, status.stdout + status.stderr
    await asyncio.to_thread(deployment.scale, decode=1)
    assert starts(deployment)["dynamo_VllmWorker"] == before["dynamo_VllmWorker"]
    stopped = await asyncio.to_thread(deployment.run, "stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert deployment.process
    assert deployment.process.wait(10) == 0
    assert files_of(deployment) == []


@pytest.mark.parametrize("replaced", [0, 1, 2])
async def test_a_reload_that_is_killed_in_any_phase_loses_nothing_and_the_next_one_ends_it(
    deploy: Callable[..., Deployment], tmp_path_factory: pytest.TempPathFactory, replaced: int
) -> None:
    """It is killed when the first worker is about to be replaced (0), or that many have been."""
    file = tmp_path_factory.mktemp("config") / "agg.yaml"
    given = (REPOSITORY / "graphs" / "agg.yaml").read_text()
    file.write_text(given)
    options = (*QUIET, "--VllmWorker.ServiceArgs.workers=3")
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", str(file), *options)

    def decode_starts() -> set[tuple[int, int]]:
        """Without names: a worker may take that of one that has left."""
        return {at for name, at in starts(deployment).items() if "VllmWorker" in name}

    before = decode_starts()

    def is_in_phase() -> bool:
        now = decode_starts()
        return bool(now - before) and len(before - now) >= replaced

    async with Load(deployment.url, MODEL, clients=8, tokens=100) as load:
        await eventually(load.streams)
        file.write_text(given.replace("VllmWorker:", "VllmWorker:\n  max-num-seqs: 7"))
        reload = await asyncio.create_subprocess_exec(
            dynaplan(), "reload", "-y", env=deployment.environment, stdout=subprocess.DEVNULL
        )
        try:
            await eventually(is_in_phase, 60, 0.01)
        finally:
            reload.kill()
            await reload.wait()
        await eventually(lambda: is_whole(deployment))
        ended = await asyncio.to_thread(deployment.run, "reload", "-y")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        nothing = await asyncio.to_thread(deployment.run, "reload", "-y")
        assert "nothing has changed" in nothing.stdout, nothing.stdout + nothing.stderr
        await load.stop()
    assert load.incomplete == []
    # The worker that was started beside an old one may stay: the hold has ended with the command.
    status = await asyncio.to_thread(deployment.run, "status")
    assert "is held" not in status.stdout, status.stdout
    if len(decode_starts()) == 4:
        await asyncio.to_thread(deployment.scale, decode=3)
    await eventually(lambda: is_whole(deployment) and len(decode_starts()) == 3)
    assert before.isdisjoint(decode_starts())
