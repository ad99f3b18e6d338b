"""The signals of ``serve`` before its own loop takes them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.supervisor.serve import Serving, interrupt


class TermInDestructor:
    """Gets SIGTERM where Python ignores exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, interrupt)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def _live() -> None:
    TermInDestructor()
    async with asyncio.timeout(5.0):
        await asyncio.Event().wait()


def test_sigterm_is_not_lost_in_a_destructor() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), asyncio.Runner() as runner:
        runner.run(_live())


def test_sigterm_interrupts_without_a_loop_and_where_sigint_is_ignored() -> None:
    for handler in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, handler)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_before_serving_takes_them_ends_it_before_anything_has_begun() -> None:
    prepared: Any = SimpleNamespace(launch=None)  # the first thing to begin would miss everything else

    async def told_to_stop_at_once() -> None:
        signal.raise_signal(signal.SIGINT)
        await Serving(prepared).run()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), asyncio.Runner() as runner:
        runner.run(told_to_stop_at_once())
