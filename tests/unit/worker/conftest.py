from __future__ import annotations

import pytest

from tests.fakes.clock import LoopClock
from tests.fakes.store import FakeStore


@pytest.fixture
def clock() -> LoopClock:
    return LoopClock()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()
