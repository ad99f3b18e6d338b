"""``dynaplan gpus``: a row for each holder of a GPU, and one for a GPU that is free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynaplan.cli.gpus import BoxGpu, GpuHolder, gpu_rows, read_gpus
from dynaplan.contract.gpus import GB, Gpu, GpuActivity, GpuUse


def test_each_holder_has_a_row_and_a_free_gpu_says_so() -> None:
    gpu = Gpu(0, "GPU-a", "H100", 80 * GB)
    held = (GpuHolder("dynamo_VllmWorker"), GpuHolder("alice: python (pid 7)", 0.0, "it ends"))
    rows = gpu_rows(
        [
            BoxGpu(gpu, GpuUse(71 * GB), GpuActivity(0.9, 642.4, 61.0), held),
            BoxGpu(Gpu(1, "GPU-b"), None, GpuActivity(), ()),
        ]
    )
    assert rows[1:] == [
        ("0", "H100", "71 of 80 GB", "642", "61 C", "dynamo_VllmWorker", "", ""),
        ("", "", "", "", "", "alice: python (pid 7)", "", "it ends"),
        ("1", "-", "-", "-", "-", "free", "", ""),
    ]


def test_a_program_that_holds_memory_is_named_by_its_user_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    (tmp_path / "gpu-2.json").write_text(
        f'{{"used_bytes": {9 * GB}, "pids": [{os.getpid()}], "celsius": 61}}'
    )
    gpus = read_gpus([])
    (holder,) = gpus[2].holders
    assert f"(pid {os.getpid()})" in holder.who
    assert holder.since_unix_s > 0
    assert gpus[2].activity.celsius == 61.0
    assert gpus[1].holders == ()
