"""The signals of ``serve`` before its own loop takes them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.fleet.serve import Serving
from dynaplan.process.signals import Interruption


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class EndedInDestructor:
    """Gets a signal where Python ignores exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_loses_before_serving_ends_it_before_anything_has_begun() -> None:
    prepared: Any = SimpleNamespace(launch=None)  # the first thing to begin would miss everything else
    interruption = Interruption()
    interruption.handle_signals()
    EndedInDestructor()
    interruption.leave_to_check()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(Serving(prepared, interruption).run())
