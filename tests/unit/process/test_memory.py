"""The memory of the box, and the kernel's counts of out-of-memory kills."""

from __future__ import annotations

from pathlib import Path

import psutil

from dynaplan.process.memory import GROUP, MACHINE, box_memory, oom_kills


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


def test_the_own_control_group_is_asked_first_then_the_machine_then_nobody(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert oom_kills(proc, cgroups) == (0, MACHINE)
    (proc / "self").mkdir(parents=True)
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    assert oom_kills(proc, cgroups) == (7, MACHINE)
    (proc / "self/cgroup").write_text("4:memory:/x\n0::/user.slice/a.scope\n")
    assert oom_kills(proc, cgroups) == (7, MACHINE)
    (cgroups / "user.slice/a.scope").mkdir(parents=True)
    (cgroups / "user.slice/a.scope/memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(proc, cgroups) == (2, GROUP)


def test_a_count_that_is_no_number_is_none(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("oom_kill many\n")
    assert oom_kills(tmp_path, tmp_path) == (0, MACHINE)
