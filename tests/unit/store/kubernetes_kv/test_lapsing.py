"""The own leases: one that is not renewed in time is ended, whenever the store answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dynaplan.store.kubernetes_kv.lapsing import HeldLeases
from dynaplan.util.errors import ClusterForbidden, DynaplanError, StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Ends:
    """What was ended and when; ``error`` is raised in the place of an end."""

    def __init__(self) -> None:
        self.leases = HeldLeases(self.end)
        self.at_s: list[float] = []
        self.tries = 0
        self.error: DynaplanError | None = None

    async def end(self, lease: int) -> None:
        self.tries += 1
        if self.error:
            raise self.error
        self.leases.drop(lease)
        self.at_s.append(asyncio.get_running_loop().time())


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    await made.leases.close()


async def test_a_lease_that_nobody_renews_ends_at_its_time(ends: Ends) -> None:
    ends.leases.hold(1, 10)
    await asyncio.sleep(9)
    assert 1 in ends.leases
    await asyncio.sleep(2)
    assert ends.at_s == [10]
    assert 1 not in ends.leases


async def test_a_lease_that_is_renewed_lives_on_until_it_is_dropped(ends: Ends) -> None:
    ends.leases.hold(1, 10)
    for _ in range(5):
        await asyncio.sleep(9)
        ends.leases.renew(1)
    ends.leases.drop(1)
    ends.leases.drop(1)
    ends.leases.renew(1)
    await asyncio.sleep(99)
    assert ends.at_s == []


async def test_an_end_is_tried_until_the_store_answers(ends: Ends) -> None:
    ends.error = StoreUnavailable("away")
    ends.leases.hold(1, 10)
    await asyncio.sleep(60)
    assert ends.tries > 10
    ends.error = None
    await asyncio.sleep(3)
    assert len(ends.at_s) == 1


async def test_a_lease_that_is_wanted_again_before_it_could_be_ended_is_left_alone(ends: Ends) -> None:
    ends.error = StoreUnavailable("away")
    ends.leases.hold(1, 10)
    await asyncio.sleep(15)
    ends.leases.renew(1)
    ends.error = None
    await asyncio.sleep(9)
    assert 1 in ends.leases
    assert ends.at_s == []


async def test_a_right_that_is_missing_ends_the_tries(ends: Ends) -> None:
    ends.error = ClusterForbidden("no right")
    ends.leases.hold(1, 10)
    await asyncio.sleep(99)
    assert ends.tries == 1


async def test_closed_it_ends_nothing(ends: Ends) -> None:
    ends.leases.hold(1, 10)
    await ends.leases.close()
    await asyncio.sleep(99)
    assert ends.tries == 0
