"""Where the kernel says how many processes it has ended for lack of memory."""

from __future__ import annotations

from pathlib import Path

from dynaplan.process.memory import GROUP, MACHINE, oom_kills


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
