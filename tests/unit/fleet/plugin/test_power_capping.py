"""Caps on the simulated driver: what stood before is written down first, and comes back."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynaplan.contract.power_caps import parse_power_cap
from dynaplan.fleet import capped_limits
from dynaplan.fleet.capped_limits import DeploymentCaps, set_back
from dynaplan.fleet.gpu_devices import power_limits, simulated
from dynaplan.fleet.plugin import power_capping
from dynaplan.fleet.plugin.document import new_document
from dynaplan.fleet.plugin.power_capping import PowerCapping
from dynaplan.fleet.rules.statefile import to_json
from dynaplan.process import process_table
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.node_directory import open_node_directory, try_lock, unlock
from tests.fakes.circus import FakeTerminal
from tests.fakes.clock import ManualClock
from tests.fakes.polling import eventually
from tests.unit.fleet.test_launch import LAUNCH

NIGHT, DAY = 23 * 60, 12 * 60


class CappedBox:
    """A deployment with caps whose arbiter is this process, until it is ``killed``."""

    def __init__(self, statefile: Path, *caps: str, gpus: int = 2) -> None:
        self._write(statefile, process_table.identity_of(os.getpid()))
        self.statefile, self.minute = statefile, NIGHT
        self.limits, self.terminal = DeploymentCaps(statefile), FakeTerminal()
        devices = simulated(gpus)
        self.driver = power_limits(devices)
        self.capping = PowerCapping(
            tuple(map(parse_power_cap, caps)),
            devices,
            self.driver,
            self.limits,
            self.terminal,
            lambda _: self.minute,
            ManualClock(),
        )

    @staticmethod
    def _write(statefile: Path, arbiter: ProcessIdentity) -> None:
        statefile.write_text(to_json(new_document(replace(LAUNCH, arbiter=arbiter))))

    def killed(self) -> None:
        self._write(self.statefile, replace(process_table.identity_of(os.getpid()), started_at=1))

    @property
    def watts(self) -> list[float]:
        return [each.watts for each in self.driver.read().values()]

    @property
    def own(self) -> list[int]:
        """The GPUs whose earlier limit is written down for this deployment."""
        return [gpu.index for gpu in self.limits.own()]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the simulated driver's files."""
    directory = tmp_path / "node"
    directory.mkdir()
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(directory))
    return directory


@pytest.fixture
def box(tmp_path: Path, node: Path) -> CappedBox:
    return CappedBox(tmp_path / "ns.json", "22:00-07:00=250W")


async def test_a_cap_begins_and_ends_with_its_hours_and_is_told_once(box: CappedBox) -> None:
    await box.capping.look()
    await box.capping.look()
    assert (box.watts, box.own, box.limits.indices) == ([250.0, 250.0], [0, 1], {0, 1})
    box.minute = DAY
    await box.capping.look()
    assert (box.watts, box.own, box.limits.indices) == ([700.0, 700.0], [], set())
    assert box.terminal.lines == [
        "GPU 0,1 may draw 250 W now (--power-cap).",
        "GPU 0,1 may draw 700 W again.",
    ]


async def test_no_limit_is_changed_before_the_one_that_stood_is_written_down(
    box: CappedBox, node: Path
) -> None:
    in_the_way = node / "power-limit.GPU-SIM-0.json.tmp"
    in_the_way.mkdir()
    await box.capping.look()
    unchanged = box.watts
    in_the_way.rmdir()
    await box.capping.look()
    assert (unchanged, box.watts) == ([700.0, 250.0], [250.0, 250.0])


async def test_what_is_not_permitted_is_said_once_and_no_gpu_counts_as_capped_for_it(
    box: CappedBox, node: Path
) -> None:
    (node / "gpu-1.json").write_text(json.dumps({"keeps_power_limit": True}))
    await box.capping.look()
    await box.capping.look()
    assert (box.watts, box.own) == ([250.0, 700.0], [0])
    assert box.terminal.lines == [
        "GPU 0 may draw 250 W now (--power-cap).",
        "The power limit of GPU 1 cannot be set: Insufficient Permissions. Root may: `nvidia-smi -pl WATTS`.",
    ]


async def test_a_limit_that_may_not_be_set_back_is_remembered(box: CappedBox, node: Path) -> None:
    await box.capping.look()
    (node / "gpu-1.json").write_text(json.dumps({"keeps_power_limit": True}))
    box.minute = DAY
    await box.capping.look()
    assert (box.watts, box.own) == ([700.0, 250.0], [1])


async def test_while_the_driver_does_not_answer_what_is_written_down_stays(
    box: CappedBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    set_now = box.driver.set

    def late(index: int, watts: float) -> str:
        answers.wait()
        return set_now(index, watts)

    monkeypatch.setattr(box.driver, "set", late)
    monkeypatch.setattr(power_capping, "DRIVER_TIMEOUT_S", 0.05)
    await box.capping.look()
    assert (box.watts, box.own) == ([700.0, 700.0], [0])
    answers.set()
    monkeypatch.setattr(power_capping, "DRIVER_TIMEOUT_S", 10.0)
    await eventually(lambda: box.watts == [250.0, 250.0])
    await box.capping.look()  # waits for the end of the one that was late
    box.minute = DAY
    await box.capping.look()
    assert (box.watts, box.own) == ([700.0, 700.0], [])


async def test_without_caps_what_an_earlier_serve_left_is_set_back_and_then_nothing_is_done(
    box: CappedBox,
) -> None:
    await box.capping.look()
    uncapped = CappedBox(box.statefile)
    await uncapped.capping.run()
    assert (uncapped.watts, uncapped.own) == ([700.0, 700.0], [])


async def test_what_was_capped_on_gpus_that_a_deployment_no_longer_has_does_not_keep_it_looking(
    box: CappedBox,
) -> None:
    await box.capping.look()
    fewer = CappedBox(box.statefile, gpus=1)
    await fewer.capping.run()
    assert (box.watts, fewer.own) == ([700.0, 250.0], [1])


async def test_the_end_and_the_next_start_set_back_what_the_driver_takes(box: CappedBox, node: Path) -> None:
    await box.capping.look()
    (node / "gpu-1.json").write_text(json.dumps({"keeps_power_limit": True}))
    set_back(box.statefile)
    assert (box.watts, box.own) == ([700.0, 250.0], [1])
    (node / "gpu-1.json").unlink()
    set_back(box.statefile)
    assert box.watts == [700.0, 700.0]
    assert box.own == []
    set_back(box.statefile)


async def test_of_two_deployments_the_least_cap_holds_and_the_last_to_leave_restores(
    tmp_path: Path, node: Path
) -> None:
    one, other = CappedBox(tmp_path / "one.json", "400W"), CappedBox(tmp_path / "other.json", "300W")
    for _ in range(3):
        await one.capping.look()
        await other.capping.look()
    assert (one.watts, one.terminal.lines) == ([300.0, 300.0], ["GPU 0,1 may draw 400 W now (--power-cap)."])
    set_back(other.statefile)
    assert (one.watts, one.own) == ([400.0, 400.0], [0, 1])
    set_back(one.statefile)
    assert (one.watts, one.own) == ([700.0, 700.0], [])


@pytest.mark.parametrize("has_statefile", [True, False])
async def test_the_cap_of_a_deployment_that_was_killed_ends_with_the_next_serve_of_another(
    tmp_path: Path, node: Path, has_statefile: bool
) -> None:
    one, other = CappedBox(tmp_path / "one.json", "400W"), CappedBox(tmp_path / "other.json", "300W")
    await one.capping.look()
    await other.capping.look()
    other.killed()
    if not has_statefile:
        other.statefile.unlink()
    set_back(tmp_path / "third.json")
    assert (one.watts, one.own, other.own) == ([400.0, 400.0], [0, 1], [])
    one.killed()
    set_back(tmp_path / "third.json")
    assert (one.watts, one.own) == ([700.0, 700.0], [])


async def test_a_cap_whose_statefile_nobody_can_read_here_counts(tmp_path: Path, node: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    box = CappedBox(tmp_path / "elsewhere" / "ns.json", "300W")
    await box.capping.look()
    box.statefile.write_text("torn")
    set_back(tmp_path / "third.json")
    assert box.watts == [300.0, 300.0]
    (tmp_path / "elsewhere").rename(tmp_path / "another container's")
    set_back(tmp_path / "third.json")
    assert box.watts == [300.0, 300.0]


async def test_a_cap_whose_statefile_is_in_a_directory_of_another_user_counts_and_stops_nobody(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = CappedBox(tmp_path / "roots.json", "300W")
    await box.capping.look()
    stat = Path.stat

    def refused(path: Path, **options: Any) -> os.stat_result:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)  # as below /root, which root itself may read
    set_back(tmp_path / "third.json")
    assert box.watts == [300.0, 300.0]


async def test_a_limit_that_somebody_has_lowered_stays_when_the_cap_ends(box: CappedBox) -> None:
    await box.capping.look()
    box.driver.set(0, 220.0)
    await box.capping.look()
    set_back(box.statefile)
    assert box.watts == [220.0, 700.0]


async def test_what_was_written_before_the_machine_was_booted_sets_nothing_back(
    box: CappedBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.capping.look()
    box.driver.set(0, 450.0)
    monkeypatch.setattr(capped_limits, "boot_id", lambda: "the next one")
    assert box.own == []
    set_back(box.statefile)
    assert box.watts == [450.0, 250.0]


async def test_a_limit_that_the_driver_rounds_is_set_and_told_once(
    box: CappedBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, set_now = list[float](), box.driver.set

    def rounding(index: int, watts: float) -> str:
        asked.append(watts)
        return set_now(index, watts // 100 * 100)

    monkeypatch.setattr(box.driver, "set", rounding)
    await box.capping.look()
    await box.capping.look()
    assert (box.watts, asked) == ([200.0, 200.0], [250.0, 250.0])
    assert box.terminal.lines == ["GPU 0,1 may draw 250 W now (--power-cap)."]


async def test_while_another_deployment_changes_limits_nothing_is_changed(box: CappedBox, node: Path) -> None:
    directory = open_node_directory(node)
    lock = try_lock(directory, capped_limits.LOCK)
    assert lock is not None
    await box.capping.look()
    unchanged = box.watts
    unlock(directory, capped_limits.LOCK, lock)
    os.close(directory)
    await box.capping.look()
    assert (unchanged, box.watts, box.terminal.lines[1:]) == ([700.0, 700.0], [250.0, 250.0], [])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"x": {}}', '{"0": {"uuid": "GPU-SIM-0", "watts": "no"}}'])
def test_a_file_that_is_no_record_sets_nothing_back(box: CappedBox, node: Path, text: str) -> None:
    (node / "power-limit.GPU-SIM-0.json").write_text(text)
    assert box.own == []
    set_back(box.statefile)
    assert box.watts == [700.0, 700.0]
