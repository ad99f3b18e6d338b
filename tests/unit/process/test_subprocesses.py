from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import pytest
import uvloop

from dynaplan.process.process_table import identify
from dynaplan.process.subprocesses import start_process
from tests.fakes.polling import eventually, wait_until

ON_BOTH_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


def family() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@ON_BOTH_LOOPS
@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_start_ends_the_process_and_what_that_has_started(
    run: Callable[..., None], times: int
) -> None:
    async def cancel() -> None:
        starting = asyncio.create_task(start_process("sh", "-c", "sleep 600 & wait", start_new_session=True))
        while not family():
            await asyncio.sleep(0)
        wait_until(lambda: len(family()) == 2)  # without the loop, which would complete the start
        _, below = family()
        for _ in range(times):
            starting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await starting
        if times == 1:
            assert family() == []
        await eventually(lambda: family() == [] and identify(below.pid) is None)

    run(cancel())


@ON_BOTH_LOOPS
def test_a_program_that_is_not_there_raises_what_the_system_says(run: Callable[..., None]) -> None:
    async def start() -> None:
        with pytest.raises(FileNotFoundError):
            await start_process("no-such-program")

    run(start())


@ON_BOTH_LOOPS
def test_a_start_that_is_cancelled_and_fails_is_cancelled(run: Callable[..., None]) -> None:
    async def cancel() -> None:
        starting = asyncio.create_task(start_process("no-such-program"))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(cancel())
