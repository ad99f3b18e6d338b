"""Caps on the simulated driver: what stood before is written down first, and comes back."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from dynaplan.contract.power_caps import parse_power_cap
from dynaplan.fleet.earlier_limits import EarlierLimits, set_back
from dynaplan.fleet.gpu_devices import power_limits, simulated
from dynaplan.fleet.plugin import power_capping
from dynaplan.fleet.plugin.power_capping import PowerCapping
from tests.fakes.circus import FakeTerminal
from tests.fakes.clock import ManualClock
from tests.fakes.polling import eventually

NIGHT, DAY = 23 * 60, 12 * 60


class CappedBox:
    def __init__(self, directory: Path, *caps: str) -> None:
        self.statefile, self.minute = directory / "ns.json", NIGHT
        self.earlier, self.terminal = EarlierLimits.beside(self.statefile), FakeTerminal()
        gpus = simulated(2)
        self.driver = power_limits(gpus)
        self.capping = PowerCapping(
            tuple(map(parse_power_cap, caps)),
            gpus,
            self.driver,
            self.earlier,
            self.terminal,
            lambda _: self.minute,
            ManualClock(),
        )

    @property
    def watts(self) -> list[float]:
        return [each.watts for each in self.driver.read().values()]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the simulated driver's files."""
    directory = tmp_path / "node"
    directory.mkdir()
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(directory))
    return directory


@pytest.fixture
def box(tmp_path: Path, node: Path) -> CappedBox:
    (tmp_path / "state").mkdir()
    return CappedBox(tmp_path / "state", "22:00-07:00=250W")


async def test_a_cap_begins_and_ends_with_its_hours_and_is_told_once(box: CappedBox) -> None:
    await box.capping.look()
    await box.capping.look()
    assert (box.watts, box.earlier.watts) == ([250.0, 250.0], {0: 700.0, 1: 700.0})
    box.minute = DAY
    await box.capping.look()
    assert (box.watts, box.earlier.watts) == ([700.0, 700.0], {})
    assert box.terminal.lines == [
        "GPU 0,1 may draw 250 W now (--power-cap).",
        "GPU 0,1 may draw 700 W again.",
    ]


async def test_no_limit_is_changed_before_the_one_that_stood_is_written_down(box: CappedBox) -> None:
    in_the_way = box.statefile.with_suffix(".power-limits.tmp")
    in_the_way.mkdir()
    await box.capping.look()
    unchanged = box.watts
    in_the_way.rmdir()
    await box.capping.look()
    assert (unchanged, box.watts) == ([700.0, 700.0], [250.0, 250.0])


async def test_what_is_not_permitted_is_said_once_and_no_gpu_counts_as_capped_for_it(
    box: CappedBox, node: Path
) -> None:
    (node / "gpu-1.json").write_text(json.dumps({"keeps_power_limit": True}))
    await box.capping.look()
    await box.capping.look()
    assert (box.watts, box.earlier.watts) == ([250.0, 700.0], {0: 700.0})
    assert box.terminal.lines == [
        "GPU 0 may draw 250 W now (--power-cap).",
        "The power limit of GPU 1 cannot be set: Insufficient Permissions. Root may: `nvidia-smi -pl WATTS`.",
    ]


async def test_a_limit_that_may_not_be_set_back_is_remembered(box: CappedBox, node: Path) -> None:
    await box.capping.look()
    (node / "gpu-1.json").write_text(json.dumps({"keeps_power_limit": True}))
    box.minute = DAY
    await box.capping.look()
    assert (box.watts, box.earlier.watts) == ([700.0, 250.0], {1: 700.0})


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
    assert (box.watts, box.earlier.watts) == ([700.0, 700.0], {0: 700.0, 1: 700.0})
    answers.set()
    monkeypatch.setattr(power_capping, "DRIVER_TIMEOUT_S", 10.0)
    await eventually(lambda: box.watts == [250.0, 250.0])
    box.minute = DAY
    await box.capping.look()
    assert (box.watts, box.earlier.watts) == ([700.0, 700.0], {})


async def test_without_caps_what_an_earlier_serve_left_is_set_back_and_then_nothing_is_done(
    box: CappedBox,
) -> None:
    await box.capping.look()
    uncapped = CappedBox(box.statefile.parent)
    await uncapped.capping.run()
    assert (uncapped.watts, uncapped.earlier.watts) == ([700.0, 700.0], {})


async def test_the_end_and_the_next_start_set_back_what_the_driver_takes(box: CappedBox, node: Path) -> None:
    await box.capping.look()
    (node / "gpu-1.json").write_text(json.dumps({"keeps_power_limit": True}))
    set_back(box.statefile)
    assert (box.watts, EarlierLimits.beside(box.statefile).watts) == ([700.0, 250.0], {1: 700.0})
    (node / "gpu-1.json").unlink()
    set_back(box.statefile)
    assert box.watts == [700.0, 700.0]
    assert not list(box.statefile.parent.glob("ns.*"))
    set_back(box.statefile)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"x": {}}', '{"0": {"uuid": "GPU-SIM-0", "watts": "no"}}'])
def test_a_file_that_is_no_list_of_limits_sets_nothing_back(box: CappedBox, text: str) -> None:
    box.statefile.with_suffix(".power-limits").write_text(text)
    assert EarlierLimits.beside(box.statefile).by_gpu == {}
    set_back(box.statefile)
