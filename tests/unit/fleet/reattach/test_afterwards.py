from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.fleet.plugin.document import new_document
from dynaplan.fleet.reattach.afterwards import clear_up
from dynaplan.fleet.statefile_store import NamespaceLock, StatefileStore
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.process_table import boot_id, identity_of
from tests.unit.fleet.test_launch import LAUNCH


@pytest.fixture
def holder() -> ProcessIdentity:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return ProcessIdentity(process.pid, 77, boot_id())


def left_by(arbiter: ProcessIdentity, directory: Path) -> tuple[StatefileStore, list[str]]:
    """What a killed holder has left: its statefile, and a directory with a file."""
    store = StatefileStore(directory / "state" / "ns.json")
    store.write(new_document(replace(LAUNCH, arbiter=arbiter, statefile=store.path)))
    run = directory / "run"
    run.mkdir()
    (run / "token").write_text("secret")
    return store, [str(store.path), str(run)]


def test_nothing_is_left_of_the_deployment_of_a_killed_holder(
    holder: ProcessIdentity, tmp_path: Path
) -> None:
    _, left = left_by(holder, tmp_path)
    clear_up(left, holder.pid)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_another_serve_that_has_the_namespace_keeps_what_is_its_own(
    holder: ProcessIdentity, tmp_path: Path
) -> None:
    store, left = left_by(identity_of(os.getpid()), tmp_path)
    with NamespaceLock(store.path):
        clear_up(left, holder.pid)
    clear_up(left, holder.pid)  # its lock is free for a moment, and its arbiter runs
    assert store.read()
    assert (tmp_path / "run" / "token").exists()


def test_a_serve_that_starts_meanwhile_waits_until_it_is_cleared_up(
    holder: ProcessIdentity, tmp_path: Path
) -> None:
    store, _ = left_by(holder, tmp_path)
    clearing, cleared = NamespaceLock(store.path, holder.pid), threading.Event()
    clearing.acquire()

    def clear() -> None:
        cleared.set()
        clearing.release()

    timer = threading.Timer(0.2, clear)
    timer.start()
    try:
        with NamespaceLock(store.path):
            assert cleared.is_set()
    finally:
        timer.join()
