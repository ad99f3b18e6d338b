"""``dynaplan orchestrate`` as a user types it, over a store in files and without any other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.runtime import VirtualConnectorClient
from dynaplan.store.file_store import FileStore
from tests.contract.runtimes import runtime_of
from tests.fakes.polling import eventually


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    places = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_LOCAL_STATE_DIR": str(tmp_path / "state"),
        "HOME": str(tmp_path),
    }
    return {**os.environ, **places, "DYN_DISCOVERY_BACKEND": "file", "DYNAPLAN_WORKER_TOKEN": "secret"}


@pytest.fixture
async def store(environment: dict[str, str]) -> AsyncIterator[FileStore]:
    store = FileStore.from_environment(environment)
    yield store
    await store.close()


def orchestrate(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dynaplan", "orchestrate", "--namespace", "ns", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


async def test_a_decision_reaches_the_users_command_and_its_success_the_planner(
    environment: dict[str, str], store: FileStore, tmp_path: Path
) -> None:
    await store.put("v1/ns/planner/num_decode_workers", "3")
    await store.put("v1/ns/planner/decision_id", "7")
    says = f'env > "{tmp_path}/seen"'
    process = orchestrate(environment, "--exec", says, "--once")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert (seen["DECISION_ID"], seen["NUM_DECODE_WORKERS"]) == ("7", "3")
    assert "NUM_PREFILL_WORKERS" not in seen
    assert await VirtualConnectorClient(runtime_of(store)).get() == DesiredCounts(-1, 3, 7, 7)


async def test_sigterm_ends_it_and_the_command_that_runs(
    environment: dict[str, str], store: FileStore, tmp_path: Path
) -> None:
    await store.put("v1/ns/planner/decision_id", "7")
    child = tmp_path / "child"
    process = orchestrate(environment, "--exec", f'echo $$ > "{child}"; exec sleep 600')
    pid = int(await eventually(lambda: child.exists() and child.read_text().strip(), 30))
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.splitlines()[-1]) == (0, "stopped")
    assert not psutil.pid_exists(pid)
