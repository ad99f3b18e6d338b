"""A connection that is made when it is first used."""

from __future__ import annotations

import asyncio

import pytest

from dynaplan.util.connection import OnFirstUse


class Connection:
    def __init__(self) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Server:
    """Lets clients connect once ``is_up`` and ``gate`` allow it; counts the attempts."""

    def __init__(self) -> None:
        self.attempts = 0
        self.is_up = True
        self.gate = asyncio.Event()
        self.gate.set()

    async def connect(self) -> Connection:
        self.attempts += 1
        await self.gate.wait()
        if not self.is_up:
            raise ConnectionError
        return Connection()


async def test_everybody_gets_the_same_connection() -> None:
    server = Server()
    use = OnFirstUse(server.connect)
    assert server.attempts == 0
    first, second = await asyncio.gather(use(), use())
    assert first is second
    assert server.attempts == 1


async def test_after_a_failure_the_next_call_tries_again() -> None:
    server = Server()
    use = OnFirstUse(server.connect)
    server.is_up = False
    with pytest.raises(ConnectionError):
        await use()
    server.is_up = True
    assert await use()
    assert server.attempts == 2


async def test_a_caller_that_gives_up_does_not_break_the_attempt_off() -> None:
    server = Server()
    use = OnFirstUse(server.connect)
    server.gate.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await use()
    server.gate.set()
    assert await use()
    assert server.attempts == 1


async def test_closing_closes_the_connection_and_what_was_never_used_needs_none() -> None:
    await OnFirstUse(Server().connect).close()
    use = OnFirstUse(Server().connect)
    connection = await use()
    await use.close()
    assert connection.is_closed
