from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynaplan.engines.port import HandOffReady
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest
from dynaplan.util.errors import PermanentError, QueueUnavailable, RequestRefused
from dynaplan.worker.prefill_puller import MAX_DELIVERIES, PrefillPuller, release_subject
from tests.fakes.clock import LoopClock
from tests.fakes.plain_engine import PlainEngine

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Item:
    def __init__(self, payload: bytes, broker: Broker, deliveries: int = 1) -> None:
        self.payload = payload
        self.deliveries = deliveries
        self.broker = broker
        self.told_in_progress = 0

    async def ack(self) -> None:
        self.broker.check()
        self.broker.events.append("ack")
        self.broker.acknowledged.append(self)

    async def in_progress(self) -> None:
        self.broker.check()
        self.told_in_progress += 1


class Broker:
    """A queue and a messenger in memory that can be away, as NATS can."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Item] = asyncio.Queue()
        self.acknowledged: list[Item] = []
        self.answers: list[PrefillAnswer] = []
        self.events: list[str] = []
        self.receivers: dict[str, Callable[[str, bytes], None]] = {}
        self.is_away = False
        self.lane: Broker | None = None

    def check(self) -> None:
        if self.is_away:
            raise QueueUnavailable("away")

    def ask(self, request_id: str, deliveries: int = 1) -> Item:
        request = RemotePrefillRequest(request_id, reply_to="ns.prefill_answers.f")
        item = Item(request.to_json(), self, deliveries)
        self.waiting.put_nowait(item)
        return item

    async def connect(self) -> Any:
        self.check()
        return self

    async def queue(self, stream: str, taker: str = "") -> Any:
        self.check()
        assert stream == "ns_prefill_queue"
        if not taker:
            return self
        if self.lane is None:
            self.lane = Broker()
            self.lane.answers, self.lane.events = self.answers, self.events
        return self.lane

    async def get(self, timeout_s: float) -> Item | None:
        self.check()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.waiting.get()
        except TimeoutError:
            return None

    async def subscribe(self, subject: str, receive: Callable[[str, bytes], None]) -> None:
        self.check()
        assert subject not in self.receivers
        self.receivers[subject] = receive

    async def publish(self, subject: str, payload: bytes) -> None:
        self.check()
        assert subject == "ns.prefill_answers.f"
        self.events.append("answer")
        self.answers.append(PrefillAnswer.from_json(payload))


class Engine(PlainEngine):
    """Hands over when it has computed for ``takes_s``, and goes on computing for ``goes_on_s``."""

    def __init__(self) -> None:
        self.takes_s = 0.5
        self.goes_on_s = 0.0
        self.error: Exception | None = None
        self.late_error: Exception | None = None
        self.is_mute = False
        self.running = self.most_running = 0

    async def prefill(self, request: RemotePrefillRequest, hand_off_ready: HandOffReady) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.takes_s)
            if self.error:
                raise self.error
            if not self.is_mute:
                await hand_off_ready({"kv_transfer_params": {"remote_request_id": request.request_id}})
            await asyncio.sleep(self.goes_on_s)
            if self.late_error:
                raise self.late_error
        finally:
            self.running -= 1


class HoldingEngine(Engine):
    waits_for_release = True

    def __init__(self) -> None:
        super().__init__()
        self.released: list[str] = []

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class Setup:
    def __init__(self, engine: Engine | None = None, lane: str = "") -> None:
        self.broker = Broker()
        self.engine = engine or Engine()
        self.is_asleep = False
        self.puller = PrefillPuller(
            self.broker.connect,  # type: ignore[arg-type]
            self.engine,
            LoopClock(),
            "ns",
            "ns_PrefillWorker",
            2,
            is_asleep=lambda: self.is_asleep,
            lane=lane,
        )
        self.task = asyncio.create_task(self.puller.run())


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    made.broker.is_away = False
    await made.puller.finish()
    await made.task


async def test_the_answer_is_sent_before_the_work_is_acknowledged(setup: Setup) -> None:
    setup.broker.ask("r1")
    await asyncio.sleep(1)
    assert setup.broker.events == ["answer", "ack"]
    hand_off = {"kv_transfer_params": {"remote_request_id": "r1"}}
    assert setup.broker.answers == [PrefillAnswer("r1", "ns_PrefillWorker", hand_off)]


async def test_it_is_answered_as_soon_as_the_decode_side_may_begin_and_acknowledged_at_the_end(
    setup: Setup,
) -> None:
    setup.engine.takes_s, setup.engine.goes_on_s = 0, 5
    setup.broker.ask("r1")
    await asyncio.sleep(1)
    assert setup.broker.events == ["answer"]
    assert setup.puller.held == 1
    await asyncio.sleep(5)
    assert setup.broker.events == ["answer", "ack"]


async def test_a_failure_after_the_hand_over_is_left_to_the_decode_side_to_find_out(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.engine.late_error = RuntimeError("the transfer broke")
    setup.broker.ask("r1")
    await asyncio.sleep(1)
    assert setup.broker.events == ["answer", "ack"]
    assert setup.broker.answers[0].error == ""
    assert "the transfer broke" in caplog.text


async def test_a_prefill_that_ends_without_a_hand_over_is_an_error_that_the_decode_worker_can_mend(
    setup: Setup,
) -> None:
    setup.engine.is_mute = True
    setup.broker.ask("r1")
    await asyncio.sleep(1)
    (answer,) = setup.broker.answers
    assert (answer.error, answer.is_retryable) == ("the engine handed nothing over", True)
    assert setup.broker.events == ["answer", "ack"]


async def test_an_engine_that_holds_its_hand_offs_hears_what_was_taken() -> None:
    made = Setup(engine := HoldingEngine())
    made.broker.ask("r1")
    await asyncio.sleep(1)
    (answer,) = made.broker.answers
    assert answer.release_to == "ns.kv_hand_offs.ns_PrefillWorker"
    made.broker.receivers[answer.release_to](answer.release_to, b"r1")
    assert engine.released == ["r1"]
    made.broker.is_away = True
    await asyncio.sleep(5)
    made.broker.is_away = False
    await asyncio.sleep(5)  # the messenger itself subscribes again: a second time would be told twice
    await made.puller.finish()
    await made.task


async def test_the_subject_of_releases_has_no_wildcard_in_it() -> None:
    assert release_subject("my ns", "a>b*c/d") == "my_ns.kv_hand_offs.a_b_c_d"


async def test_no_more_is_taken_than_the_engine_batches(setup: Setup) -> None:
    for number in range(6):
        setup.broker.ask(f"r{number}")
    await asyncio.sleep(0.1)
    assert (setup.puller.held, setup.broker.waiting.qsize()) == (2, 4)
    await asyncio.sleep(3)
    assert setup.engine.most_running == 2
    assert len(setup.broker.acknowledged) == 6


async def test_long_work_says_that_it_goes_on(setup: Setup) -> None:
    setup.engine.takes_s = 10.5
    item = setup.broker.ask("r1")
    await asyncio.sleep(12)
    assert item.told_in_progress == 10


async def test_what_cannot_be_read_is_dropped_once_and_for_all(setup: Setup) -> None:
    for payload in (b"", b"[]", b"{}", b"\xff", b'"text"'):
        setup.broker.waiting.put_nowait(Item(payload, setup.broker))
    await asyncio.sleep(1)
    assert setup.broker.events == ["ack"] * 5


async def test_what_is_too_large_to_send_is_an_error_answer(setup: Setup) -> None:
    publish = setup.broker.publish

    async def refuse_once(subject: str, payload: bytes) -> None:
        setup.broker.publish = publish  # type: ignore[method-assign]
        raise PermanentError("too large")

    setup.broker.publish = refuse_once  # type: ignore[method-assign]
    setup.broker.ask("r1")
    await asyncio.sleep(1)
    (answer,) = setup.broker.answers
    assert answer.error == "PermanentError: too large"


async def test_an_engine_error_is_an_answer(setup: Setup) -> None:
    setup.engine.error = RuntimeError("out of blocks")
    setup.broker.ask("r1")
    await asyncio.sleep(1)
    (answer,) = setup.broker.answers
    assert (answer.error, answer.is_retryable) == ("RuntimeError: out of blocks", True)
    setup.engine.error = PermanentError("never")
    setup.broker.ask("r2")
    await asyncio.sleep(1)
    assert not setup.broker.answers[1].is_retryable
    setup.engine.error = RequestRefused("below 0", status=422)
    setup.broker.ask("r3")
    await asyncio.sleep(1)
    assert (setup.broker.answers[2].is_retryable, setup.broker.answers[2].status) == (False, 422)
    assert len(setup.broker.acknowledged) == 3


async def test_a_request_that_keeps_killing_its_workers_is_given_up(setup: Setup) -> None:
    setup.broker.ask("r1", deliveries=MAX_DELIVERIES + 1)
    await asyncio.sleep(1)
    assert setup.engine.most_running == 0
    assert "given up" in setup.broker.answers[0].error
    assert not setup.broker.answers[0].is_retryable
    assert len(setup.broker.acknowledged) == 1


async def test_what_is_delivered_again_while_it_is_worked_on_is_done_once(setup: Setup) -> None:
    setup.engine.takes_s = 3
    setup.broker.ask("r1")
    setup.broker.ask("r1", deliveries=2)
    await asyncio.sleep(5)
    assert setup.engine.most_running == 1
    assert setup.broker.events == ["answer", "ack"]
    assert setup.puller.held == 0


async def test_a_queue_that_is_away_is_waited_for(setup: Setup) -> None:
    setup.broker.is_away = True
    await asyncio.sleep(60)
    assert not setup.task.done()
    setup.broker.is_away = False
    setup.broker.ask("r1")
    await asyncio.sleep(5)
    assert len(setup.broker.acknowledged) == 1


async def test_work_done_while_the_queue_was_away_is_answered_and_acknowledged_when_it_is_back(
    setup: Setup,
) -> None:
    setup.engine.takes_s = 3
    setup.broker.ask("r1")
    await asyncio.sleep(1)
    setup.broker.is_away = True
    await asyncio.sleep(5)
    setup.broker.is_away = False
    await asyncio.sleep(5)
    assert setup.broker.events == ["answer", "ack"]


async def test_finishing_takes_nothing_more_and_returns_when_all_is_acknowledged(setup: Setup) -> None:
    setup.engine.takes_s = 4
    for number in range(3):
        setup.broker.ask(f"r{number}")
    await asyncio.sleep(1)
    await setup.puller.finish()
    assert setup.puller.held == 0
    assert len(setup.broker.acknowledged) == 2
    assert setup.broker.waiting.qsize() == 1


async def test_finishing_what_never_ran_does_not_raise_or_wait() -> None:
    puller = PrefillPuller(Broker().connect, Engine(), LoopClock(), "ns", "w")  # type: ignore[arg-type]
    await asyncio.wait_for(puller.finish(), 1)


async def test_while_the_engine_sleeps_nothing_is_taken_from_the_queue() -> None:
    setup = Setup()
    setup.is_asleep = True
    setup.broker.ask("r1")
    await asyncio.sleep(5)
    assert setup.broker.waiting.qsize() == 1
    setup.is_asleep = False
    await asyncio.sleep(1)
    assert setup.broker.events == ["answer", "ack"]
    await setup.puller.finish()
    await setup.task


@asynccontextmanager
async def with_lane() -> AsyncIterator[tuple[Setup, Broker]]:
    """A puller with a lane, and what stands for that."""
    made = Setup(lane="ns_PrefillWorker")
    await asyncio.sleep(0.1)
    assert made.broker.lane
    yield made, made.broker.lane
    made.broker.is_away = False
    await made.puller.finish()
    await made.task


async def test_a_directed_prompt_does_not_wait_for_a_slot_of_the_shared_queue() -> None:
    async with with_lane() as (directed, lane):
        directed.engine.takes_s = 5
        for number in range(3):
            directed.broker.ask(f"shared{number}")
        await asyncio.sleep(0.1)
        assert directed.puller.held == 2
        lane.ask("directed")
        await asyncio.sleep(0.1)
        assert directed.puller.held == 3


async def test_a_worker_with_its_hands_full_of_directed_prompts_takes_nothing_else() -> None:
    async with with_lane() as (directed, lane):
        directed.engine.takes_s = 5
        for number in range(3):
            lane.ask(f"directed{number}")
        await asyncio.sleep(3)
        directed.broker.ask("shared")
        await asyncio.sleep(1.5)
        assert directed.puller.held == 2
        await asyncio.sleep(2)
        assert {each.request_id for each in directed.broker.answers} == {"directed0", "directed1"}
        await asyncio.sleep(8)
        answered = {each.request_id for each in directed.broker.answers}
        assert answered == {"directed0", "directed1", "directed2", "shared"}


async def test_an_outage_of_the_lane_is_waited_out_as_one_of_the_queue() -> None:
    async with with_lane() as (directed, lane):
        directed.broker.is_away = lane.is_away = True
        await asyncio.sleep(5)
        directed.broker.is_away = lane.is_away = False
        lane.ask("r1")
        await asyncio.sleep(4)
        assert [each.request_id for each in directed.broker.answers] == ["r1"]
