"""A prefill worker from outside: a real child, a real etcd and NATS, the simulated engine."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from dynaplan.events.nats_messenger import NatsMessenger
from dynaplan.events.port import WorkQueue
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest, prefill_stream
from dynaplan.store.etcd import EtcdStore
from dynaplan.util.errors import QueueUnavailable
from tests.fakes.polling import eventually
from tests.fakes.servers import Server
from tests.integration.worker_child import Worker, Workers, workers_of

LONG = " ".join(["light"] * 6000)
SLOW = {"speedup-ratio": 0.1}
"""A long prompt takes more than a second."""


class Router:
    """The frontend's part: asks for prefills and collects the answers."""

    def __init__(self, messenger: NatsMessenger, queue: WorkQueue) -> None:
        self.messenger = messenger
        self.queue = queue
        self.answers: list[PrefillAnswer] = []

    async def ask(self, request_id: str, prompt: str = "Tell me") -> None:
        body = {"model": "sim", "prompt": prompt, "max_tokens": 4}
        request = RemotePrefillRequest(request_id, body=body, reply_to="ns.prefill_answers.test")
        await self.queue.put(request.to_json())

    def hear(self, _: str, payload: bytes) -> None:
        self.answers.append(PrefillAnswer.from_json(payload))

    async def answered(self, count: int) -> list[PrefillAnswer]:
        await eventually(lambda: len(self.answers) >= count)
        return self.answers


@pytest.fixture
def workers(tmp_path: Path, etcd: Server, nats: Server) -> Iterator[Workers]:
    yield from workers_of(tmp_path, {**etcd.environment, **nats.environment})


@pytest.fixture
async def router(nats: Server) -> AsyncIterator[Router]:
    messenger = await NatsMessenger.from_environment(nats.environment)
    made = Router(messenger, await messenger.queue(prefill_stream("ns")))
    await messenger.subscribe("ns.prefill_answers.test", made.hear)
    yield made
    await messenger.close()


async def take(session: aiohttp.ClientSession, answer: PrefillAnswer) -> int:
    params = answer.hand_off["kv_transfer_params"]
    url = f"http://{params['remote_host']}:{params['remote_port']}/kv/{params['remote_request_id']}/take"
    async with session.post(url) as response:
        return response.status


def prefill_worker(workers: Workers, number: int = 0, **settings: float) -> Worker:
    return workers.make("PrefillWorker", settings, DYNAPLAN_WORKER_NAME=f"ns_PrefillWorker_{number}")


async def test_a_prefill_is_computed_answered_and_acknowledged(
    workers: Workers, store: EtcdStore, router: Router, session: aiohttp.ClientSession
) -> None:
    worker = prefill_worker(workers)
    instance = await worker.start(store)
    assert instance.key.startswith("/services/ns/PrefillWorker/generate/")
    await router.ask("r1")
    (answer,) = await router.answered(1)
    assert (answer.request_id, answer.worker, answer.error) == ("r1", worker.name, "")

    async def is_done() -> bool:
        return await router.queue.depth() == 0

    await eventually(is_done)
    assert await take(session, answer) == 200


async def test_sigterm_lets_it_finish_what_it_holds_and_hand_it_over(
    workers: Workers, store: EtcdStore, router: Router, session: aiohttp.ClientSession
) -> None:
    worker = prefill_worker(workers, **SLOW)
    await worker.start(store)
    await router.ask("r1", LONG)
    await eventually(lambda: worker.running(session))
    worker.signal(signal.SIGTERM)
    (answer,) = await router.answered(1)
    assert answer.error == ""
    assert await take(session, answer) == 200
    assert await worker.exit_code() == 0
    assert worker.proof.startswith("drained: held 1 requests when told to leave, 1 finished, 0 cut, in ")
    assert await router.queue.depth() == 0
    await router.ask("after it left")
    assert await router.queue.depth() == 1


async def test_what_a_killed_worker_held_is_computed_by_another(
    workers: Workers, store: EtcdStore, router: Router, session: aiohttp.ClientSession
) -> None:
    first = prefill_worker(workers, 0, **SLOW)
    await first.start(store)
    await router.ask("r1", LONG)
    await eventually(lambda: first.running(session))
    first.end()
    second = prefill_worker(workers, 1)
    await second.start(store)
    (answer,) = await router.answered(1)
    assert (answer.worker, answer.error) == (second.name, "")


async def test_a_worker_started_while_nats_is_away_registers_and_works_when_it_is_back(
    workers: Workers,
    store: EtcdStore,
    router: Router,
    nats: Server,
) -> None:
    await router.ask("waiting")
    nats.kill()
    worker = prefill_worker(workers)
    await worker.start(store)
    await nats.start_again()

    async def is_done() -> bool:
        try:
            return await router.queue.depth() == 0
        except QueueUnavailable:
            return False

    # Its answer is lost when the router is back later than the worker: it is a message, not a queue.
    await eventually(is_done)
    await router.ask("afterwards")
    await eventually(lambda: "afterwards" in [answer.request_id for answer in router.answers])


async def test_poison_does_not_go_round_in_circles(
    workers: Workers, store: EtcdStore, router: Router
) -> None:
    worker = prefill_worker(workers)
    await worker.start(store)
    for payload in (b"no JSON", b"{}", b"[1]"):
        await router.queue.put(payload)
    await router.ask("good")
    await router.answered(1)

    async def is_empty() -> bool:
        return await router.queue.depth() == 0

    await eventually(is_empty)
    assert worker.log.count("dropping what is no prefill request") == 3
