"""A unit test knows nothing of the environment that it runs in."""

from __future__ import annotations

import pytest

from tests.fakes.clock import LoopClock
from tests.fakes.store import FakeStore


@pytest.fixture(autouse=True)
def _no_configuration(no_configuration: None) -> None:
    """Keep a configuration in the environment from every unit test."""


@pytest.fixture
def clock() -> LoopClock:
    return LoopClock()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()
