"""Whichever instances come and go, a client that asks in turn or at random leaves none out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.store.instances import Instance
from dynaplan.worker.endpoint_client import EndpointClient, NotAccepted, rotate

IDS = st.sets(st.integers(1, 2**63 - 1), min_size=1, max_size=6)
CHURN = st.lists(IDS, min_size=1, max_size=30)


@given(CHURN)
def test_a_round_is_every_instance_once(churn: list[set[int]]) -> None:
    last = -1
    for ids in churn:
        order = rotate(tuple(ids), last)
        assert sorted(order) == sorted(ids)
        last = order[0]


@given(st.sets(st.integers(1, 9), min_size=1), CHURN)
def test_one_that_stays_is_asked_between_any_two_turns_of_another(
    staying: set[int], churn: list[set[int]]
) -> None:
    last, asked = -1, []
    for ids in churn:
        last = rotate(tuple(ids | staying), last)[0]
        asked.append(last)
    for other in set(asked):
        turns = [number for number, each in enumerate(asked) if each == other]
        for first, second in pairwise(turns):
            assert staying - {other} <= set(asked[first + 1 : second])


class Instances:
    """The discovery that a client sees: these ids, all of one endpoint."""

    def __init__(self, ids: set[int]) -> None:
        self.ids = ids

    def instances(self, component: str, endpoint: str) -> tuple[Instance, ...]:
        return tuple(Instance("ns", component, endpoint, each, "http://nowhere") for each in sorted(self.ids))


async def _answers(_: Any, instance: Instance, body: bytes, deadline_s: float) -> AsyncGenerator[Any, None]:
    """What an instance does: those with an even id take the request, the others are draining."""
    if instance.instance_id % 2:
        raise NotAccepted("draining")
    yield instance.instance_id


async def _request(ids: set[int], how: str, calls: int) -> Counter[int]:
    discovery: Any = Instances(ids)
    session: aiohttp.ClientSession | Any = None
    client = EndpointClient("backend", "generate", discovery, session)
    with patch("dynaplan.worker.endpoint_client.post_request", _answers):
        return Counter([item for _ in range(calls) async for item in getattr(client, how)()])


@given(IDS, st.sampled_from(["round_robin", "random"]), st.integers(1, 20))
def test_only_instances_that_take_requests_answer_and_every_call_is_answered_once(
    ids: set[int], how: str, calls: int
) -> None:
    ids = ids | {2}
    counts = asyncio.run(_request(ids, how, calls))
    assert counts.total() == calls
    assert set(counts) <= {each for each in ids if each % 2 == 0}


@given(st.sets(st.integers(1, 500).map(lambda number: 2 * number), min_size=1, max_size=6), st.integers(1, 5))
def test_in_turn_each_of_the_instances_gets_as_many_calls_as_the_others(ids: set[int], rounds: int) -> None:
    assert set(asyncio.run(_request(ids, "round_robin", rounds * len(ids))).values()) == {rounds}
