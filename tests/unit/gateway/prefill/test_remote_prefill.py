"""The frontend's side of the prefill queue: remote, local, and every way to fall back. No sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from dynaplan.config.settings.frontend import DisaggregationSettings, FrontendSettings
from dynaplan.events.port import Messenger, WorkItem, WorkQueue
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.gateway import timing
from dynaplan.gateway.kv_routing.router_inputs import ReportedBlocks
from dynaplan.gateway.openai_api import COMPLETIONS, ApiError, Call, PromptBlocks, parse_call
from dynaplan.gateway.prefill import remote_prefill
from dynaplan.gateway.prefill.prefill_queue import PrefillRouter, RoutedPrompt
from dynaplan.gateway.prefill.remote_prefill import HandOff, RemotePrefill
from dynaplan.gateway.routing.sleeping_workers import SleepingWorkers
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import ASLEEP, WAKE, Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import QueueUnavailable
from dynaplan.util.tasks import BackgroundTasks
from tests.fakes.memory_messenger import MemoryMessenger
from tests.fakes.polling import PATIENCE_S, eventually

ON = DisaggregationSettings(is_on=True)
PREFILL_WORKER = Instance("ns", "PrefillWorker", "generate", 7, "http://127.0.0.1:9", "ns_PrefillWorker")


@dataclass
class Runtime:
    discovery: Discovery
    connected: MemoryMessenger
    namespace: str = "ns"

    async def messenger(self) -> Messenger:
        return self.connected


@dataclass
class Counter:
    placed: list[str]

    def count_prefill(self, model: str, place: str) -> None:
        self.placed.append(place)


@dataclass
class Scene:
    prefill: RemotePrefill
    messenger: MemoryMessenger
    store: MemoryStore
    queue: WorkQueue
    discovery: Discovery
    sleeping: SleepingWorkers
    placed: list[str] = field(default_factory=list)

    async def take(self) -> tuple[WorkItem, RemotePrefillRequest]:
        item = await self.queue.get(PATIENCE_S)
        assert item
        return item, RemotePrefillRequest.from_json(item.payload)

    async def asked(self) -> tuple[asyncio.Task[HandOff | None], RemotePrefillRequest]:
        """A prompt that a prefill worker has taken: who waits for its hand-off, and what was taken."""
        hand_off = asyncio.create_task(self.prefill.hand_off(call(), 0.0))
        _, request = await self.take()
        return hand_off, request

    async def answer(self, request: RemotePrefillRequest, **answer: object) -> None:
        text = json.dumps({"request_id": request.request_id, **answer}).encode()
        await self.messenger.publish(request.reply_to, text)


def call(prompt: str = "The sky is") -> Call:
    return parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())


def fields(hand_off: HandOff | None) -> dict[str, object]:
    assert hand_off
    return dict(hand_off.fields)


@asynccontextmanager
async def scene(
    settings: DisaggregationSettings = ON,
    wait_s: float = 30.0,
    prefill_workers: int = 1,
    reported: ReportedBlocks | None = None,
) -> AsyncIterator[Scene]:
    clock = SystemClock()
    store, messenger, placed = MemoryStore(clock), MemoryMessenger(clock), list[str]()
    if prefill_workers:
        await store.put(PREFILL_WORKER.key, PREFILL_WORKER.to_json())
    discovery = Discovery(store, "ns")
    await discovery.start()

    background = BackgroundTasks()
    sleeping = SleepingWorkers(store, "ns", background, clock.now_s)
    prefill = RemotePrefill(
        Runtime(discovery, messenger),
        FrontendSettings(disaggregation=settings, prefill_wait_s=wait_s, prefill_component="PrefillWorker"),
        Counter(placed),
        background,
        sleeping=sleeping,
        reported=reported,
    )
    await prefill.connect()
    queue = await messenger.queue(prefill_stream("ns"))
    try:
        yield Scene(prefill, messenger, store, queue, discovery, sleeping, placed)
    finally:
        await prefill.close()
        await background.finish(2.0)
        await discovery.close()
        await store.close()


@pytest.fixture
async def here() -> AsyncIterator[Scene]:
    async with scene() as made:
        yield made


async def test_the_answers_parameters_are_the_hand_off(here: Scene) -> None:
    hand_off, request = await here.asked()
    assert request.body == {"model": "m", "prompt": "The sky is"}
    await here.answer(request, worker="p", hand_off={"remote_port": 1})
    assert fields(await hand_off) == {"remote_port": 1}
    assert here.placed == ["remote"]


async def test_a_second_answer_after_a_redelivery_changes_nothing(here: Scene) -> None:
    hand_off, request = await here.asked()
    await here.answer(request, hand_off={"remote_port": 1})
    await here.answer(request, hand_off={"remote_port": 2})
    assert fields(await hand_off) == {"remote_port": 1}
    await here.answer(request, hand_off={"remote_port": 3})
    assert here.placed == ["remote"]


async def test_a_message_that_is_no_answer_is_ignored(here: Scene) -> None:
    hand_off, request = await here.asked()
    for garbage in (b"", b"[]", b"{}", b"\xff"):
        await here.messenger.publish(request.reply_to, garbage)
    await here.answer(request, hand_off={"remote_port": 1})
    assert fields(await hand_off) == {"remote_port": 1}


async def test_a_retryable_error_falls_back(here: Scene) -> None:
    hand_off, request = await here.asked()
    await here.answer(request, error="no blocks", is_retryable=True)
    assert await hand_off is None
    assert here.placed == ["fallback"]


async def test_an_error_that_is_not_retryable_is_the_clients(here: Scene) -> None:
    hand_off, request = await here.asked()
    await here.answer(request, error="too odd", is_retryable=False)
    with pytest.raises(ApiError, match="too odd"):
        await hand_off


async def test_a_request_that_is_wrong_is_answered_with_the_engines_status(here: Scene) -> None:
    hand_off, request = await here.asked()
    await here.answer(request, error="temperature is below 0", is_retryable=False, status=400)
    with pytest.raises(ApiError, match="below 0") as caught:
        await hand_off
    assert caught.value.status == 400


async def test_without_an_answer_in_time_it_falls_back_and_withdraws_the_work() -> None:
    async with scene(wait_s=0.01) as here:
        assert await here.prefill.hand_off(call(), 0.0) is None
        await eventually(lambda: _is_empty(here.queue))
        assert here.placed == ["fallback"]


async def test_when_the_last_prefill_worker_leaves_those_who_wait_fall_back(here: Scene) -> None:
    hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0))
    await here.take()
    await here.store.delete(PREFILL_WORKER.key)
    assert await hand_off is None
    assert here.placed == ["fallback"]


async def test_an_answer_lost_on_its_way_is_noticed_by_the_empty_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "PREFILL_ANSWER_S", 0.01)
    async with scene() as here:
        hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0))
        item, _ = await here.take()
        await item.ack()
        assert await hand_off is None
        assert here.placed == ["fallback"]


async def test_a_client_that_leaves_withdraws_its_work(here: Scene) -> None:
    hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0))
    await eventually(lambda: _has_work(here.queue))
    hand_off.cancel()
    await eventually(lambda: _is_empty(here.queue))


async def test_while_the_queue_is_away_every_prefill_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PREFILL_QUEUE_TIMEOUT_S", PATIENCE_S)
    async with scene() as here:
        here.messenger.is_available = False
        assert await here.prefill.hand_off(call(), 0.0) is None
        assert await here.prefill.hand_off(call(), 0.0) is None
        assert here.placed == ["fallback", "local"]


async def test_a_request_larger_than_a_message_is_prefilled_locally(here: Scene) -> None:
    assert await here.prefill.hand_off(call("x" * 1024 * 1024), 0.0) is None
    assert await here.queue.depth() == 0
    assert here.placed == ["fallback"]


async def test_a_request_larger_than_a_message_is_refused_where_only_a_prefill_worker_could_compute_it(
    here: Scene,
) -> None:
    with pytest.raises(ApiError, match=r"shorten the prompt") as refused:
        await here.prefill.hand_off(call("x" * 1024 * 1024), 0.0, is_needed=True)
    assert refused.value.status == 413


class LateQueues(MemoryMessenger):
    """A server whose JetStream is not ready before the third attempt, as after its start; messages pass."""

    attempts = 0

    async def queue(self, stream: str, taker: str = "") -> WorkQueue:
        self.attempts += 1
        if self.attempts < 3:
            raise QueueUnavailable("it has no JetStream yet", delay_s=0.001)
        return await super().queue(stream, taker)


async def test_while_the_queue_is_late_the_log_says_so_once_and_answers_are_subscribed_to_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messenger = LateQueues(SystemClock())
    async with scene() as here:
        settings = FrontendSettings(disaggregation=ON, prefill_component="PrefillWorker")
        prefill = RemotePrefill(Runtime(here.discovery, messenger), settings, Counter([]), BackgroundTasks())
        await prefill.connect()
        await prefill.close()
    assert len(messenger._server.receivers) == 1
    assert [each.levelname for each in caplog.records if "JetStream" in each.message] == ["WARNING"]


async def test_without_a_prefill_worker_nothing_is_queued() -> None:
    async with scene(prefill_workers=0) as here:
        assert await here.prefill.hand_off(call(), 0.0) is None
        assert await here.queue.depth() == 0
        assert here.placed == ["local"]


async def test_own_requests_count_at_once_against_the_queues_limit(here: Scene) -> None:
    waiting = [asyncio.create_task(here.prefill.hand_off(call(), 0.0)) for _ in range(2)]
    await eventually(lambda: here.prefill.queue_size == 2)
    assert await here.prefill.hand_off(call(), 0.0) is None
    assert here.placed == ["local"]
    for task in waiting:
        task.cancel()


async def test_the_work_of_others_counts_once_it_was_read(here: Scene) -> None:
    for _ in range(2):
        await here.queue.put(b"{}")
    first = asyncio.create_task(here.prefill.hand_off(call(), 0.0))
    await eventually(lambda: here.prefill.queue_size >= 2)
    assert await here.prefill.hand_off(call(), 0.0) is None
    first.cancel()


async def test_the_live_settings_decide_from_then_on() -> None:
    conditional = DisaggregationSettings(is_on=True, is_conditional=True)
    async with scene(conditional, wait_s=0.01) as here:
        await here.prefill.hand_off(call(), 0.0)
        here.prefill.configure({"/ns/disagg_router/max_local_prefill_length": "1"})
        await here.prefill.hand_off(call(), 0.0)
        here.prefill.configure({})
        await here.prefill.hand_off(call(), 0.0)
        assert here.placed == ["local", "fallback", "local"]


async def test_an_answer_reads_back_as_it_was_written() -> None:
    answer = PrefillAnswer("id", "p", {"a": 1}, "", True, "here")
    assert PrefillAnswer.from_json(answer.to_json()) == answer


async def released_in(here: Scene) -> list[tuple[str, str]]:
    """What is published to let hand-offs go: (subject, request id), in a list that grows."""
    seen: list[tuple[str, str]] = []
    await here.messenger.subscribe("kv.>", lambda subject, payload: seen.append((subject, payload.decode())))
    return seen


async def test_a_hand_off_is_let_go_once_however_often_it_is_released() -> None:
    async with scene() as here:
        released = await released_in(here)
        waiting, request = await here.asked()
        await here.answer(request, hand_off={"a": 1}, release_to="kv.p")
        hand_off = await waiting
        assert hand_off
        assert released == []
        hand_off.release()
        hand_off.release()
        await eventually(lambda: bool(released))
    assert released == [("kv.p", request.request_id)]


async def test_a_hand_off_that_asks_for_no_release_gets_none() -> None:
    async with scene() as here:
        released = await released_in(here)
        waiting, request = await here.asked()
        await here.answer(request, hand_off={"a": 1})
        hand_off = await waiting
        assert hand_off
        hand_off.release()
    assert released == []


async def test_an_answer_that_nobody_waits_for_any_more_is_let_go() -> None:
    async with scene(wait_s=0.25) as here:
        released = await released_in(here)
        waiting, request = await here.asked()
        assert await waiting is None
        await here.answer(request, hand_off={"a": 1}, release_to="kv.p")
        await eventually(lambda: released == [("kv.p", request.request_id)])


async def test_the_answer_of_a_client_that_leaves_as_it_comes_is_let_go(here: Scene) -> None:
    released = await released_in(here)
    waiting, request = await here.asked()
    await here.answer(request, hand_off={"a": 1}, release_to="kv.p")
    waiting.cancel()
    await eventually(lambda: released == [("kv.p", request.request_id)])


async def test_of_two_answers_the_one_that_is_not_used_is_let_go() -> None:
    async with scene() as here:
        released = await released_in(here)
        waiting, request = await here.asked()
        await here.answer(request, hand_off={"a": 1}, release_to="kv.p")
        await here.answer(request, hand_off={"a": 1}, release_to="kv.p")
        await here.answer(request, hand_off={"a": 2}, release_to="kv.other")
        assert fields(await waiting) == {"a": 1}
        await eventually(lambda: bool(released))
    assert released == [("kv.other", request.request_id)]


async def test_a_failed_prefill_holds_nothing_that_could_be_let_go() -> None:
    async with scene() as here:
        released = await released_in(here)
        waiting, request = await here.asked()
        await here.answer(request, error="no blocks", release_to="kv.p")
        assert await waiting is None
    assert released == []


async def _is_empty(queue: WorkQueue) -> bool:
    return await queue.depth() == 0


async def _has_work(queue: WorkQueue) -> bool:
    return await queue.depth() > 0


async def test_a_decode_worker_on_another_host_computes_its_prompts_itself(here: Scene) -> None:
    apart = replace(PREFILL_WORKER, network="there")
    await here.store.put(apart.key, apart.to_json())
    taker = Instance("ns", "VllmWorker", "generate", 9, "http://10.0.0.2:1", network="here")
    await eventually(lambda: not here.prefill.can_reach(taker))
    assert await here.prefill.hand_off(call(), 0.0, taker=taker) is None
    assert here.placed == ["local"]
    assert here.prefill.can_reach(replace(taker, network="there"))


async def test_prefill_workers_that_all_sleep_have_one_woken_and_the_prompt_is_computed_locally() -> None:
    async with scene(replace(ON, is_conditional=False)) as here:
        here.sleeping.follow({ASLEEP.key("ns", PREFILL_WORKER.instance_id): ""})
        assert await here.prefill.hand_off(call(), 0.0) is None
        assert here.placed == ["local"]
        await eventually(lambda: here.store.get(WAKE.key("ns", PREFILL_WORKER.instance_id)))


async def test_a_short_prompt_wakes_nobody() -> None:
    async with scene(replace(ON, is_conditional=True)) as here:
        here.sleeping.follow({ASLEEP.key("ns", PREFILL_WORKER.instance_id): ""})
        assert await here.prefill.hand_off(call(), 0.0) is None
        await asyncio.sleep(0)
        assert await here.store.get(WAKE.key("ns", PREFILL_WORKER.instance_id)) is None


@pytest.mark.parametrize("is_asleep_before", [True, False])
async def test_a_prompt_that_must_be_computed_remotely_waits_for_the_worker_that_is_woken(
    is_asleep_before: bool,
) -> None:
    asleep = {ASLEEP.key("ns", PREFILL_WORKER.instance_id): ""}
    async with scene(replace(ON, is_conditional=False)) as here:
        here.sleeping.follow(asleep if is_asleep_before else {})
        placing = asyncio.create_task(here.prefill.hand_off(call(), 0.0, is_needed=True))
        _, request = await here.take()
        here.sleeping.follow(asleep)
        await eventually(lambda: here.store.get(WAKE.key("ns", PREFILL_WORKER.instance_id)))
        await here.answer(request, hand_off={"taken": "over"})
        assert fields(await placing) == {"taken": "over"}
        assert here.placed == ["remote"]


# Prompts routed by prefix

WITH_QUEUE = replace(PREFILL_WORKER, instance_id=8, worker="near", card={"prefill_lane": "near"})
BLOCKS = PromptBlocks((1, 2, 3, 4), 16, 64)


class Told:
    """The worker with the near_queue holds the first three blocks."""

    def __init__(self, *, is_current: bool = True) -> None:
        self._is_current = is_current

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        return {8: len([each for each in hashes if each in (1, 2, 3)]), 99: 4}

    def is_current(self, instance_id: int) -> bool:
        return self._is_current


@asynccontextmanager
async def near(reported: Told | None = None) -> AsyncIterator[tuple[Scene, WorkQueue]]:
    """A scene with a second worker, and its near_queue."""
    async with scene(replace(ON, max_prefill_queue_size=10), reported=reported or Told()) as here:
        await here.store.put(WITH_QUEUE.key, WITH_QUEUE.to_json())
        await eventually(lambda: len(here.discovery.instances("PrefillWorker")) == 2)
        yield here, await here.messenger.queue(prefill_stream("ns"), "near")


async def test_a_prompt_goes_to_the_worker_that_has_it_cached_and_the_next_does_not_wait_there() -> None:
    async with near() as (here, near_queue):
        hand_offs = [asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=BLOCKS)) for _ in range(4)]
        await eventually(lambda: _has_depth(here.queue, 4))
        assert await near_queue.depth() == 3, "each leaves one block to compute, and three are cached"
        assert here.prefill.queue_size == 4
        for queue, count in ((near_queue, 3), (here.queue, 1)):
            for _ in range(count):
                item = await queue.get(PATIENCE_S)
                assert item
                request = RemotePrefillRequest.from_json(item.payload)
                await here.answer(request, hand_off={"remote_port": 1})
                await item.ack()
        assert [fields(await each) for each in hand_offs] == [{"remote_port": 1}] * 4
        again = asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=BLOCKS))
        await eventually(lambda: _has_depth(near_queue, 1))
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


@pytest.mark.parametrize(
    ("reported", "blocks"), [(Told(is_current=False), BLOCKS), (Told(), PromptBlocks((7, 8), 16, 32))]
)
async def test_what_nobody_is_known_to_have_cached_goes_to_the_shared_queue(
    reported: Told, blocks: PromptBlocks
) -> None:
    async with near(reported) as (here, near_queue):
        hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=blocks))
        _, request = await here.take()
        assert await near_queue.depth() == 0
        await here.answer(request, hand_off={"remote_port": 1})
        assert fields(await hand_off) == {"remote_port": 1}


@pytest.mark.parametrize("is_taken", [False, True])
async def test_prompts_directed_to_a_worker_that_dies_go_back_to_the_others(is_taken: bool) -> None:
    async with near() as (here, near_queue):
        hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=BLOCKS))
        await eventually(lambda: _has_depth(near_queue, 1))
        if is_taken:
            assert await near_queue.get(PATIENCE_S)
        await here.store.delete(WITH_QUEUE.key)
        _, request = await here.take()
        assert await near_queue.depth() == 0
        await here.answer(request, hand_off={"remote_port": 1})
        assert fields(await hand_off) == {"remote_port": 1}


@pytest.mark.parametrize("slow", ["remove", "put"])
async def test_a_client_that_leaves_while_its_prompt_goes_back_to_the_others_leaves_no_work(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    monkeypatch.setattr(timing, "WORKER_QUEUE_CLEAR_DELAY_S", 0.0)
    has_begun, goes_on = asyncio.Event(), asyncio.Event()
    async with near() as (here, near_queue):
        queue = here.prefill._queue
        call_server = getattr(queue, slow)

        async def call_slowly(argument: object) -> object:
            has_begun.set()
            await goes_on.wait()
            return await call_server(argument)

        hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=BLOCKS))
        await eventually(lambda: _has_depth(near_queue, 1))
        monkeypatch.setattr(queue, slow, call_slowly)
        await here.store.delete(WITH_QUEUE.key)
        await has_begun.wait()
        hand_off.cancel()
        await asyncio.gather(hand_off, return_exceptions=True)
        goes_on.set()
        await here.prefill._background.finish()
        assert await here.queue.depth() == 0


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_prompt_directed_to_a_worker_that_stands_still_goes_to_the_others_and_so_do_later_ones(
    monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    monkeypatch.setattr(remote_prefill, "WORKER_QUEUE_SHARE", 0.005)
    async with near() as (here, near_queue):
        taking = asyncio.create_task(near_queue.get(PATIENCE_S)) if is_taken else None
        for _ in range(2):
            hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=BLOCKS))
            _, request = await here.take()
            assert await near_queue.depth() == 0
            await here.answer(request, worker=PREFILL_WORKER.worker, hand_off={"remote_port": 1})
            assert fields(await hand_off) == {"remote_port": 1}
        if taking:
            assert await taking
        await here.answer(request, worker=WITH_QUEUE.worker, hand_off={"remote_port": 2})
        again = asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=BLOCKS))
        item = await near_queue.get(PATIENCE_S)
        assert item, "it has answered, and gets prompts again"
        await here.answer(RemotePrefillRequest.from_json(item.payload), hand_off={"remote_port": 3})
        assert fields(await again) == {"remote_port": 3}


async def test_a_worker_that_answers_is_waited_for_and_one_that_is_alone_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_prefill, "WORKER_QUEUE_SHARE", 0.002)
    looks: list[bool] = []

    def is_silent(director: PrefillRouter, routed: RoutedPrompt, patience_s: float) -> bool:
        looks.append(False)
        return False

    monkeypatch.setattr(PrefillRouter, "is_silent", is_silent)
    async with near() as (here, near_queue):
        hand_off = asyncio.create_task(here.prefill.hand_off(call(), 0.0, blocks=BLOCKS))
        await eventually(lambda: len(looks) > 1)
        assert await near_queue.depth() == 1
        await here.store.delete(PREFILL_WORKER.key)
        await eventually(lambda: len(here.discovery.instances("PrefillWorker")) == 1)
        monkeypatch.undo()
        item = await near_queue.get(PATIENCE_S)
        assert item
        await here.answer(RemotePrefillRequest.from_json(item.payload), hand_off={"remote_port": 1})
        assert fields(await hand_off) == {"remote_port": 1}


async def test_a_worker_is_silent_while_it_answers_nothing() -> None:
    director = PrefillRouter("ns", not_connected, None)
    routed = RoutedPrompt(WITH_QUEUE, cast(WorkQueue, None), 1)
    assert director.is_silent(routed, 5.0), "it was never heard"
    director.record_answer(WITH_QUEUE.worker)
    assert not director.is_silent(routed, 5.0)
    assert director.is_silent(routed, -1.0)


async def not_connected() -> Messenger:
    raise NotImplementedError


async def test_what_a_dead_frontend_directed_to_a_dead_worker_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "WORKER_QUEUE_CLEAR_DELAY_S", 0.2)
    async with near() as (here, near_queue):
        await near_queue.put(b"another's")
        await here.store.delete(WITH_QUEUE.key)
        await eventually(lambda: _has_depth(near_queue, 0))


async def test_the_queue_of_a_worker_that_came_back_is_not_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "WORKER_QUEUE_CLEAR_DELAY_S", 0.1)
    async with near() as (here, near_queue):
        await near_queue.put(b"another's")
        again = replace(WITH_QUEUE, instance_id=10)
        await here.store.put(again.key, again.to_json())
        await eventually(lambda: len(here.discovery.instances("PrefillWorker")) == 3)
        await here.store.delete(WITH_QUEUE.key)
        await eventually(lambda: len(here.discovery.instances("PrefillWorker")) == 2)
        await asyncio.sleep(0.25)
        assert await near_queue.depth() == 1


async def _has_depth(queue: WorkQueue, depth: int) -> bool:
    return await queue.depth() == depth


async def test_a_prompt_bears_its_deadline_where_the_queue_is_dispatched_by_deadline() -> None:
    by_deadline = replace(ON, prefill_deadline_ms=500.0, prefill_late_wait_s=15.0)
    async with scene(by_deadline, wait_s=30.0) as here:
        begun_s = time.time()
        hand_off, request = await here.asked()
        assert 0 <= request.arrived_unix_s - begun_s < 60
        assert request.deadline_unix_s == pytest.approx(request.arrived_unix_s + 0.5)
        assert request.owed_unix_s == pytest.approx(request.deadline_unix_s + 15.0)
        assert request.waits_until_unix_s == pytest.approx(request.deadline_unix_s + 29.5)
        await here.answer(request)
        await hand_off


async def test_without_one_the_payload_has_no_times(here: Scene) -> None:
    hand_off, request = await here.asked()
    assert (request.deadline_unix_s, request.owed_unix_s, request.waits_until_unix_s) == (0, 0, 0)
    await here.answer(request)
    await hand_off


async def test_the_next_deadline_leaves_what_the_first_token_took_after_its_hand_over() -> None:
    async with scene(replace(ON, prefill_deadline_ms=60_000.0), wait_s=30.0) as here:
        hand_off, request = await here.asked()
        await here.answer(request)
        taken = await hand_off
        assert taken
        await asyncio.sleep(0.05)
        taken.on_first_token()

        hand_off, request = await here.asked()
        assert request.deadline_unix_s - request.arrived_unix_s < 59.95
        await here.answer(request)
        await hand_off


async def test_two_models_never_share_a_queue_nor_use_that_of_the_namespace(here: Scene) -> None:
    models = []
    for number, component in ((8, "ant-prefill"), (9, "bee-prefill")):
        worker = replace(PREFILL_WORKER, component=component, instance_id=number, worker=component)
        await here.store.put(worker.key, worker.to_json())
        settings = FrontendSettings(disaggregation=ON, prefill_component=component)
        runtime = Runtime(here.discovery, here.messenger)
        model = RemotePrefill(runtime, settings, Counter([]), BackgroundTasks(), is_one_of_several=True)
        await model.connect()
        models.append((component, model))
    await eventually(lambda: here.discovery.instances("bee-prefill"))
    for component, model in models:
        asked = asyncio.create_task(model.hand_off(call(component), 0.0))
        queue = await here.messenger.queue(prefill_stream("ns", component))
        item = await queue.get(PATIENCE_S)
        assert item
        request = RemotePrefillRequest.from_json(item.payload)
        assert request.body["prompt"] == component
        await item.ack()
        await here.answer(request, worker=component, hand_off={"of": component})
        assert fields(await asked) == {"of": component}
        await model.close()
    assert await here.queue.depth() == 0
