"""kill -9 of ``serve``: no request notices, and it is back by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.e2e.deployment import MODEL, REPOSITORY, Deployment
from tests.e2e.test_kills import is_whole, process_of
from tests.e2e.traces import files_of, in_torture, processes_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually, wait_until

pytestmark = in_torture

KILLS = int(os.environ.get("DYNAPLAN_KILLS", "5"))
QUIET = ("--Planner.no-operation=true",)


def serve_of(deployment: Deployment) -> psutil.Process | None:
    """The ``serve`` below the holder that runs now, once its fleet plugin does."""
    assert deployment.process
    try:
        below = psutil.Process(deployment.process.pid).children()
        return next(each for each in below if "serve" in each.cmdline() and each.children())
    except (StopIteration, psutil.Error):
        return None


def starts(deployment: Deployment) -> dict[str, tuple[int, int]]:
    return {name: (each["pid"], each["started_at"]) for name, each in deployment.workers().items()}


@pytest.mark.timeout(120 + 20 * KILLS)
async def test_no_request_notices_that_serve_is_killed(deploy: Callable[..., Deployment]) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    before, took_s = starts(deployment), []
    async with Load(deployment.url, MODEL, clients=40, tokens=200) as load:
        for _ in range(KILLS):
            await eventually(load.streams)
            old = serve_of(deployment)
            assert old
            begun_s, adoptions = time.monotonic(), deployment.text.count("Adopted 6 processes")
            old.kill()
            await eventually(lambda count=adoptions: deployment.text.count("Adopted 6") > count)
            took_s.append(time.monotonic() - begun_s)
            await eventually(lambda: serve_of(deployment))
        await load.stop()
    print(f"adopted after {min(took_s):.2f} to {max(took_s):.2f} s; {len(load.outcomes)} requests")
    assert load.incomplete == []
    assert starts(deployment) == before
    assert is_whole(deployment)
    assert deployment.stop() == 0
    wait_until(lambda: not processes_of(deployment))
    assert files_of(deployment) == []


async def test_what_was_adopted_is_scaled_restarted_and_shown_like_any_other(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    before = starts(deployment)
    os.kill(serve_of(deployment).pid, signal.SIGKILL)  # type: ignore[union-attr]
    await eventually(lambda: "Adopted 6" in deployment.text and serve_of(deployment))
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


def test_a_file_that_is_broken_meanwhile_changes_nothing(
    deploy: Callable[..., Deployment], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("config") / "agg.yaml"
    file.write_text((REPOSITORY / "graphs" / "agg.yaml").read_text())
    deployment = deploy("graphs.agg:Frontend", str(file), *QUIET)
    before = starts(deployment)
    file.write_text("Frontend: [this is no section\n")
    os.kill(serve_of(deployment).pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_until(lambda: "Adopted" in deployment.text and serve_of(deployment))
    assert starts(deployment) == before


def test_what_does_not_fit_together_is_ended_and_serve_starts_anew(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    before = starts(deployment)
    os.kill(process_of(deployment, "FleetPlugin").pid, signal.SIGSTOP)  # it would write the file again
    deployment.statefile_path.unlink()
    os.kill(serve_of(deployment).pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_until(lambda: serve_of(deployment) and is_whole(deployment) and deployment.workers())
    assert not set(before.values()) & set(starts(deployment).values())
    assert deployment.stop() == 0
    assert files_of(deployment) == []


def test_a_serve_that_never_comes_back_lets_requests_finish_and_leaves_nothing(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET, "--orphan-grace", "3")
    assert deployment.process

    def killed_again() -> bool:
        assert deployment.process
        for each in (
            psutil.Process(deployment.process.pid).children() if deployment.process.poll() is None else []
        ):
            if "serve" in each.cmdline():
                each.kill()
        return deployment.process.poll() is not None

    wait_until(killed_again, 60)
    wait_until(lambda: not processes_of(deployment))
    # A claim counts only while its arbiter runs.
    assert [each for each in files_of(deployment) if "/node/" not in each] == []


def test_kill_9_of_the_holder_and_of_both_leaves_nothing(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    assert deployment.process
    for _ in range(2):
        children = deployment.children()
        deployment.process.kill()
        deployment.process.wait()
        wait_until(lambda left=children: not any(each.is_running() for each in left), 5)
        deployment.start()
    serve = serve_of(deployment)
    assert serve
    serve.kill()
    children = deployment.children()
    deployment.process.kill()
    deployment.process.wait()
    wait_until(lambda: not any(each.is_running() for each in children), 5)
