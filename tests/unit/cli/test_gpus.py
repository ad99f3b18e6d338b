"""``dynaplan gpus``: a row for each holder of a GPU, and one for a GPU that is free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynaplan.cli.gpus import read_gpus


def test_a_program_that_holds_memory_is_named_by_its_user_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path))
    (tmp_path / "gpu-2.json").write_text(
        f'{{"used_bytes": {9 * 2**30}, "pids": [{os.getpid()}], "celsius": 61}}'
    )
    gpus = read_gpus([])
    (holder,) = gpus[2].holders
    assert f"(pid {os.getpid()})" in holder.who
    assert holder.since_unix_s > 0
    assert gpus[2].activity.celsius == 61.0
    assert gpus[1].holders == ()
