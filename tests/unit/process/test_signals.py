from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dynaplan.process.signals import (
    Interruption,
    ended_by_sigint,
    on_signals,
    run_interruptible,
    signals_blocked,
)
from tests.fakes.polling import eventually


async def test_every_listener_hears_of_a_signal_and_the_process_is_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    heard: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(on_signals(lambda name: heard.append(f"first {name}")))
        with on_signals(lambda name: heard.append(f"second {name}")):
            os.kill(os.getpid(), signal.SIGTERM)
            await eventually(lambda: heard == ["first SIGTERM", "second SIGTERM"])
        os.kill(os.getpid(), signal.SIGINT)
        await eventually(lambda: heard[2:] == ["first SIGINT"])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture
def hang_up() -> Iterator[Callable[[Any], None]]:
    """Sets what SIGHUP does until the test's end: the tests may run under nohup, which ignores it."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_work_that_is_interrupted_takes_back_what_it_has_half_done(
    number: signal.Signals, hang_up: Callable[[Any], None]
) -> None:
    hang_up(signal.SIG_DFL)
    taken_back: list[bool] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            taken_back.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())
    assert taken_back


def test_an_ignored_hang_up_stays_ignored(hang_up: Callable[[Any], None]) -> None:
    hang_up(signal.SIG_IGN)

    async def work() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return 3

    assert run_interruptible(work()) == 3


async def test_outside_the_main_thread_nothing_is_heard_and_nothing_breaks() -> None:
    async def inside() -> bool:
        with on_signals(lambda name: None):
            return True

    assert await asyncio.to_thread(lambda: asyncio.run(inside()))


def test_a_signal_waits_for_the_end_of_the_block_that_holds_it() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals_blocked():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]


def test_sigint_ends_a_process_at_once_where_keyboard_interrupt_would_get_lost() -> None:
    code = """
import signal
from dynaplan.process.signals import ended_by_sigint

class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

with ended_by_sigint():
    Destroyed()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, b"")


def test_sigint_is_left_to_another_that_handles_it_and_given_back_to_python() -> None:
    handled: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: handled.append(number))
    with ended_by_sigint():
        signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ended_by_sigint():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("handlers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_is_raised_at_once_and_again_where_python_has_lost_it(number: int) -> None:
    class Destroyed:
        def __del__(self) -> None:
            signal.raise_signal(number)

    interruption = Interruption()
    interruption.handle_signals()
    interruption.check()
    Destroyed()
    with pytest.raises(KeyboardInterrupt):
        interruption.check()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


@pytest.mark.usefixtures("handlers")
def test_an_ignored_sigint_stays_ignored_and_sigterm_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interruption = Interruption()
    interruption.handle_signals()
    signal.raise_signal(signal.SIGINT)
    interruption.check()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("handlers")
def test_an_interruption_that_is_left_to_the_check_is_raised_by_it_alone() -> None:
    interruption = Interruption()
    interruption.handle_signals()
    interruption.leave_to_check()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interruption.check()
