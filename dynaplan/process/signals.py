"""SIGTERM and SIGINT as calls in an event loop, for as many listeners as a process has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

HANDLED = (signal.SIGTERM, signal.SIGINT)

_listeners: list[Callable[[str], None]] = []
_handlers_before: dict[signal.Signals, Any] = {}
"""Both are of the one loop that runs in the main thread."""


@contextmanager
def on_signals(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with the signal's name whenever SIGTERM or SIGINT arrives, inside the block.

    Blocks may overlap: each has its listener called. After the last block the handlers are set back to those
    before the first. Outside the main thread, where Python takes no signals, the listener is never called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from asyncio import get_running_loop

    loop = get_running_loop()
    if not _listeners:
        for number in HANDLED:
            _handlers_before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, _tell, number.name)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            for number in HANDLED:
                loop.remove_signal_handler(number)
                signal.signal(number, _handlers_before.pop(number) or signal.SIG_DFL)


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run as ``asyncio.run`` does, but SIGTERM and SIGHUP interrupt it, too, as Ctrl-C does.

    Raises KeyboardInterrupt when the work was interrupted.
    For work that undoes what is half done when it is interrupted. A signal that is ignored, as under nohup,
    stays so.
    """
    from asyncio import CancelledError, current_task, get_running_loop, run

    async def cancelled_by_signals() -> T:
        task = current_task()
        assert task
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return run(cancelled_by_signals())
    except CancelledError:
        raise KeyboardInterrupt from None


def _tell(name: str) -> None:
    for listener in tuple(_listeners):
        listener(name)


@contextmanager
def ended_by_sigint() -> Iterator[None]:
    """Have the kernel end the process at SIGINT, inside the block; for where nothing is held yet.

    KeyboardInterrupt can get lost in what runs there, imports above all: Python ignores it in destructors and
    in callbacks of the garbage collector. Nothing is changed outside the main thread, nor where SIGINT is
    ignored or handled by something else.
    """
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_pythons or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interruption:
    """SIGINT and SIGTERM as a KeyboardInterrupt that ``check`` raises again when Python has lost it.

    Python ignores exceptions in destructors, in callbacks of the garbage collector and of weak references:
    there is one in every import. For where something is held that is to be given back.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._is_raised = True

    def handle_signals(self) -> None:
        """Have the two signals raise KeyboardInterrupt from now on; SIGINT not where it is ignored."""
        signal.signal(signal.SIGTERM, self._interrupt)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)

    def leave_to_check(self) -> None:
        """From now on raise in ``check`` alone, not where a signal arrives; for making an event loop."""
        self._is_raised = False

    def check(self) -> None:
        """Raise KeyboardInterrupt when a signal has arrived."""
        if self._has_come:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        if self._is_raised:
            raise KeyboardInterrupt


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Have SIGTERM and SIGINT wait for the end of the block; outside the main thread nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in HANDLED}
    for number in HANDLED:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for late in arrived[:1]:
            signal.raise_signal(late)
