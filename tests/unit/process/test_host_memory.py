"""The memory of the box, and of a container that may use a part of it."""

from __future__ import annotations

from pathlib import Path

import psutil

from dynaplan.process.memory import box_memory


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    found = box_memory(tmp_path)
    assert found.total_bytes == psutil.virtual_memory().total + psutil.swap_memory().total
    assert 0 < found.available_bytes <= found.total_bytes


def test_a_container_has_its_limit_and_gets_the_memory_of_idle_files_back(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert box_memory(tmp_path).available_bytes == 100_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert (box_memory(tmp_path).total_bytes, box_memory(tmp_path).available_bytes) == (1_000_000, 400_000)
    (tmp_path / "memory.stat").write_text("inactive_file many\n")
    assert box_memory(tmp_path).available_bytes == 100_000
