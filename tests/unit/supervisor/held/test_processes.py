"""A held process as circus sees it. That it is started, adopted and ended is shown in tests/e2e."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import psutil
import pytest

from dynaplan.supervisor.held.processes import HeldProcess


def test_a_process_has_not_begun_in_the_future_though_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun_s = psutil.Process().create_time()
    monkeypatch.setattr(time, "time", lambda: begun_s - 30)
    process = HeldProcess.__new__(HeldProcess)
    process.name = "ns_VllmWorker"
    fleet = SimpleNamespace(adoptable={"ns_VllmWorker": os.getpid()}, processes={})
    process.watcher = SimpleNamespace(held_fleet=fleet)
    process.spawn()
    assert process.started == begun_s - 30
    assert fleet.processes == {os.getpid(): process}
