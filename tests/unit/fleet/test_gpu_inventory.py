"""Which GPUs are left out at the start, and how the user is told."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.gpu_devices import simulated
from dynaplan.fleet.gpu_inventory import in_use, notes, shows_gpus


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    for index in (1, 2):
        (tmp_path / f"gpu-{index}.json").write_text(json.dumps({"used_bytes": 71 * 2**30}))
    return tmp_path


def test_gpus_in_use_are_found_but_for_the_ones_that_deployments_have() -> None:
    assert list(in_use(simulated(3), {1})) == [2]


def test_memory_that_is_being_freed_is_waited_for(node: Path) -> None:
    remove = threading.Timer(0.2, (node / "gpu-2.json").unlink)
    remove.start()
    assert in_use(simulated(3), {1}, 20) == {}
    remove.join()


REAL = (Gpu(0, "GPU-1"),)
LLAMA = {"Worker": {"engine": "llamacpp"}}


@pytest.mark.parametrize(
    ("gpus", "asked", "config", "shown"),
    [
        (simulated(8), 1.0, {}, True),
        (simulated(8), 1.0, LLAMA, False),
        (simulated(8), 0.0, {}, False),
        (REAL, 1.0, LLAMA, True),
        (REAL, 0.0, LLAMA, False),
        ((), 0.0, {}, False),
    ],
)
def test_gpus_are_shown_where_a_worker_has_one_that_computes(
    gpus: tuple[Gpu, ...], asked: float, config: dict[str, dict[str, str]], shown: bool
) -> None:
    assert shows_gpus(gpus, [("Frontend", 0.0), ("Worker", asked)], config) is shown


def test_what_is_left_out_is_told_and_so_is_what_is_used_all_the_same() -> None:
    gpus, claimed, busy = simulated(4), {0: "claimed", 3: "claimed"}, {1: "71 of 80 GiB in use"}
    assert notes(gpus, claimed, busy, uses_busy=False) == [
        "GPU 0,3: claimed: left out",
        "GPU 1: 71 of 80 GiB in use: left out",
    ]
    assert notes(gpus, claimed, busy, uses_busy=True)[1:] == [
        "GPU 1: 71 of 80 GiB in use: used all the same (--use-busy-gpus)"
    ]
