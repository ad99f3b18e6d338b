"""A real engine killed, hung, and given what it cannot take."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import (
    PREFILL_WORKER,
    WORKER,
    aggregated,
    disaggregated,
    model_of,
    prefills,
    scratch_files,
)
from tests.e2e.traces import in_torture
from tests.fakes.load import Load
from tests.fakes.polling import eventually
from tests.fakes.processes import freeze

CLIENTS = 6


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> Iterator[Deployment]:
    options = (
        "--VllmWorker.ServiceArgs.workers=2",
        "--VllmWorker.hang-timeout=2",
        "--PrefillWorker.hang-timeout=2",
    )
    deployment = disaggregated(tmp_path_factory.mktemp("faults"), tiny_gguf, *options)
    try:
        yield deployment.start()
    finally:
        deployment.close()


async def is_back(deployment: Deployment, worker: str, old_pid: int) -> bool:
    entry = deployment.workers().get(worker, {})
    return entry.get("state") == "ready" and entry.get("pid") not in (0, old_pid)


def lost_without_a_token(load: Load) -> list[object]:
    return [outcome for outcome in load.incomplete if outcome.chunks == 0]


@pytest.mark.slow
async def test_kill_9_of_a_decode_worker_loses_only_what_had_begun(two_pools: Deployment) -> None:
    pid = two_pools.pid_of(WORKER)
    async with Load(two_pools.url, model_of(two_pools), clients=CLIENTS, tokens=300) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: is_back(two_pools, WORKER, pid), 20)
        answered = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > answered + CLIENTS, 20)
        await load.stop()
    assert lost_without_a_token(load) == []
    assert len(load.incomplete) <= CLIENTS, load.incomplete
    await eventually(lambda: scratch_files(two_pools) == [], 10)


@pytest.mark.slow
async def test_kill_9_of_a_prefill_worker_loses_nothing_and_no_file_stays(two_pools: Deployment) -> None:
    pid = two_pools.pid_of(PREFILL_WORKER)
    async with Load(two_pools.url, model_of(two_pools), clients=CLIENTS, tokens=60) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: is_back(two_pools, PREFILL_WORKER, pid), 20)
        remote = prefills(two_pools)["remote"]
        await eventually(lambda: prefills(two_pools)["remote"] > remote, 20)
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: scratch_files(two_pools) == [], 10)


@in_torture
async def test_workers_that_stand_still_are_replaced_and_busy_ones_are_not(two_pools: Deployment) -> None:
    pids = {name: entry["pid"] for name, entry in two_pools.workers().items()}
    frozen = {WORKER, PREFILL_WORKER}
    async with Load(two_pools.url, model_of(two_pools), clients=CLIENTS, tokens=300) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        for worker in frozen:
            freeze(pids[worker])
        for worker in frozen:
            await eventually(lambda worker=worker: is_back(two_pools, worker, pids[worker]), 45)
        answered = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > answered + CLIENTS, 20)
        await load.stop()
    assert lost_without_a_token(load) == []
    assert len(load.incomplete) <= CLIENTS, load.incomplete
    now = {name: entry["pid"] for name, entry in two_pools.workers().items()}
    assert {name for name in pids if pids[name] != now[name]} == frozen
    await eventually(lambda: scratch_files(two_pools) == [], 10)


@pytest.fixture
def refuse(tmp_path: Path, tiny_gguf: Path) -> Callable[..., str]:
    """Run ``dynaplan serve`` with that model and options, which it must refuse; its message."""

    def run(model: Path | None = None, *options: str) -> str:
        deployment = aggregated(tmp_path, model or tiny_gguf, *options)
        try:
            result: subprocess.CompletedProcess[str] = deployment.run(*deployment.command[1:], timeout_s=30)
        finally:
            deployment.close()
        assert result.returncode == 2, result.stdout + result.stderr
        assert "Traceback" not in result.stdout + result.stderr
        return result.stderr

    return run


def test_a_model_that_is_missing_is_refused_by_name(refuse: Callable[..., str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    message = refuse(missing)
    assert str(missing) in message
    assert "GGUF" in message


@pytest.mark.slow
def test_a_file_that_is_no_gguf_is_refused_by_name(refuse: Callable[..., str], tmp_path: Path) -> None:
    text = tmp_path / "model.gguf"
    text.write_text("not a model")
    message = refuse(text)
    assert str(text) in message
    assert "GGUF" in message


@pytest.mark.slow
def test_a_model_directory_is_refused_with_what_takes_it(refuse: Callable[..., str], tiny_hf: Path) -> None:
    message = refuse(tiny_hf)
    assert str(tiny_hf) in message
    assert "vllm" in message


def test_an_option_that_llamacpp_does_not_have_is_refused_by_name(refuse: Callable[..., str]) -> None:
    assert "n-gpu-leyers" in refuse(None, "--VllmWorker.n-gpu-leyers=3")


@pytest.mark.parametrize(
    "option",
    ["parallel=0", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ctx-size=-4", "threads=many"))],
)
def test_a_value_that_llamacpp_cannot_take_is_refused_by_name(
    refuse: Callable[..., str], option: str
) -> None:
    assert option.split("=")[0] in refuse(None, f"--VllmWorker.{option}")


def truncated(model: Path, path: Path) -> Path:
    path.write_bytes(model.read_bytes()[:200_000])
    return path


def test_a_truncated_model_is_refused_before_anything_starts(tmp_path: Path, tiny_gguf: Path) -> None:
    deployment = aggregated(tmp_path, truncated(tiny_gguf, tmp_path / "cut.gguf"))
    try:
        refused = deployment.run(*deployment.command[1:])
    finally:
        deployment.close()
    assert refused.returncode == 2
    assert "which is cut off: it has 200,000 bytes" in refused.stderr
    assert not deployment.statefile_path.exists()
