"""Whether an engine sleeps or is paused, and what waking it needs."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from dynaplan.engines.server.client import UnexpectedStatus
from dynaplan.engines.server.metrics import EngineMetrics, read_metrics
from dynaplan.engines.server.sleep import EngineSleep, SleepPaths
from dynaplan.engines.vllm import METRIC_NAMES
from dynaplan.util.errors import TemporaryError

WAKING = SleepPaths("/sleep", "/wake_up", "/resume", "/is_paused", "Set the mode.")


class Client:
    """A server that answers what it is set to; None: it has no such path; an error: that is raised."""

    def __init__(self, paused: Any = None, status: int = 200) -> None:
        self.paused = paused
        self.status = status
        self.asked: list[str] = []
        self.commands: list[str] = []

    async def text(self, path: str, timeout_s: float) -> str:
        self.asked.append(path)
        if self.paused is None:
            raise UnexpectedStatus("404")
        if isinstance(self.paused, TemporaryError):
            raise self.paused
        return self.paused if isinstance(self.paused, str) else json.dumps(self.paused)

    async def command(self, path: str, timeout_s: float) -> int:
        self.commands.append(path)
        if not self.status:
            raise TemporaryError("it does not answer")
        return self.status


def sleep_of(client: Client, waking: SleepPaths | None = WAKING) -> EngineSleep:
    return EngineSleep(waking, cast(Any, client))


def metrics(awake: int, discarded: int = 0) -> str:
    states = {"awake": awake, "weights_offloaded": 1 - awake, "discard_all": discarded}
    return "\n".join(
        f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} {value}.0'
        for state, value in states.items()
    )


def test_the_metrics_tell_sleep_and_whether_the_weights_are_there() -> None:
    assert not read_metrics("", METRIC_NAMES).is_asleep
    assert not read_metrics(metrics(awake=1), METRIC_NAMES).is_asleep
    asleep = read_metrics(metrics(awake=0), METRIC_NAMES)
    assert (asleep.is_asleep, asleep.has_weights) == (True, True)
    assert not read_metrics(metrics(awake=0, discarded=1), METRIC_NAMES).has_weights


async def test_an_engine_without_the_path_is_asked_once_whether_it_is_paused() -> None:
    client = Client(paused=None)
    sleep = sleep_of(client)
    for _ in range(3):
        assert not (await sleep.with_pause(EngineMetrics())).is_asleep
    assert client.asked == ["/is_paused"]
    assert not (await sleep_of(client, None).with_pause(EngineMetrics())).is_asleep
    assert len(client.asked) == 1


async def test_one_that_did_not_answer_in_time_is_asked_again_whether_it_is_paused() -> None:
    client = Client(paused=TemporaryError("it took too long"))
    sleep = sleep_of(client)
    assert not (await sleep.with_pause(EngineMetrics())).is_asleep
    client.paused = {"is_paused": True}
    assert (await sleep.with_pause(EngineMetrics())).is_asleep


async def test_a_paused_engine_sleeps_until_it_says_otherwise_and_is_resumed() -> None:
    client = Client(paused={"is_paused": True})
    sleep = sleep_of(client)
    assert (await sleep.with_pause(EngineMetrics())).is_asleep
    client.paused = None
    signals = await sleep.with_pause(EngineMetrics())
    assert signals.is_asleep
    assert await sleep.wake(signals) == ""
    client.paused = {"is_paused": False}
    assert not (await sleep.with_pause(EngineMetrics())).is_asleep
    assert client.commands == ["/resume"]


async def test_an_engine_that_sleeps_says_that_it_is_paused_too_and_is_woken_not_resumed() -> None:
    client = Client(paused={"is_paused": True})
    sleep = sleep_of(client)
    assert await sleep.wake(await sleep.with_pause(EngineMetrics(is_asleep=True))) == ""
    assert client.commands == ["/wake_up"]
    assert await sleep.wake(await sleep.with_pause(EngineMetrics())) == ""
    assert client.commands == ["/wake_up", "/resume"]


@pytest.mark.parametrize("answer", ["", "[", "[" * 100_000, "5", '{"is_paused": "yes"}', "null"])
async def test_an_answer_that_is_none_is_no_pause(answer: str) -> None:
    assert not (await sleep_of(Client(paused=answer)).with_pause(EngineMetrics())).is_asleep


@pytest.mark.parametrize(
    ("signals", "status", "reason"),
    [
        (EngineMetrics(), 200, ""),
        (EngineMetrics(is_asleep=True), 200, ""),
        (EngineMetrics(is_asleep=True), 404, "It has no /wake_up. Set the mode."),
        (EngineMetrics(is_asleep=True), 500, "/wake_up of the engine answered 500."),
        (EngineMetrics(is_asleep=True), 0, "it does not answer"),
        (EngineMetrics(is_asleep=True, has_weights=False), 200, "It sleeps without its weights (level 2)"),
    ],
)
async def test_waking_tells_why_it_was_in_vain(signals: EngineMetrics, status: int, reason: str) -> None:
    client = Client(status=status)
    assert (await sleep_of(client).wake(signals)).startswith(reason)
    assert bool(client.commands) == (signals.is_asleep and signals.has_weights)


async def test_an_engine_that_never_sleeps_is_not_woken() -> None:
    assert await sleep_of(Client(), None).wake(EngineMetrics(is_asleep=True)) == ""


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (200, ""),
        (404, "It has no /sleep?level=1. Set the mode."),
        (500, "/sleep?level=1 of the engine answered 500."),
        (0, "it does not answer"),
    ],
)
async def test_an_engine_is_put_to_sleep_or_says_why_not(status: int, reason: str) -> None:
    client = Client(status=status)
    assert await sleep_of(client).sleep("1") == reason
    assert client.commands == ["/sleep?level=1"]
    assert await sleep_of(client, None).sleep("1") == "it has no way to sleep."
