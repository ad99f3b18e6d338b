"""Requests for models that are loaded on request, at a real frontend over stores in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.contract.model_keys import MODEL_DEMAND, ModelDemand, ModelReport, Refusal, demand_in
from dynaplan.contract.store_keys import fleet_key
from dynaplan.gateway import timing
from dynaplan.gateway.model_queue import LoadProgress, ModelQueue
from dynaplan.gateway.openai_api import Call
from dynaplan.store.instances import SLEEP
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.polling import eventually

FOREVER = 4e9


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Stage]:
    """A frontend of the models ``ant``, which is ``emmet`` as well, and ``bee``; both are unloaded."""
    settings = OnDemandSettings(aliases=["emmet"], **options)
    models = (ServedModel("ant", "VllmWorker", settings), ServedModel("bee", "Bee"))
    async with stage(models=models) as here:
        here.runtime.instance_id = await here.store.grant(60)
        yield here


async def publish(here: Stage, report: ModelReport) -> None:
    """What the fleet plugin would publish of ``ant``."""
    document = {"roles": {}, "models": {"ant": report.to_json()}}
    await here.store.put(fleet_key("ns"), json.dumps(document))


async def demand(here: Stage) -> ModelDemand:
    items = await here.store.list(MODEL_DEMAND.prefix("ns"))
    return demand_in(each.value for each in items).get("ant", ModelDemand())


async def wait_for(here: Stage, number: int) -> None:
    async def waiting() -> bool:
        return (await demand(here)).waiting == number

    await eventually(waiting)


async def test_requests_wait_are_published_as_demand_and_are_answered_by_the_worker_that_comes() -> None:
    async with serving() as here:
        asked = [asyncio.create_task(here.post(model="ant")) for _ in range(3)]
        await wait_for(here, 3)
        assert (await demand(here)).oldest_unix_s > 0
        await here.worker()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
        await wait_for(here, 0)
        assert (await demand(here)).last_use_unix_s > 0


async def test_no_more_than_the_limit_are_at_a_worker_and_the_rest_wait_in_their_order() -> None:
    async with serving(concurrency_limit=2, max_queue=3) as here:
        await here.worker()
        router = here.frontend._models.all[0].router
        first = [await queue_book(here) for _ in range(2)]
        waiting = [asyncio.create_task(queue_book(here)) for _ in range(3)]
        await wait_for(here, 3)
        status, said = await here.post(model="ant")
        assert (status, json.loads(said)["error"]["code"]) == (429, "too_many_waiting")
        first[0].close()
        next_one = await waiting[0]
        assert [each.done() for each in waiting] == [True, False, False]
        for each in (first[1], next_one):
            each.close()
        for each in await asyncio.gather(*waiting[1:]):
            each.close()
        assert router.in_flight == 0


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", True), ("0.0.0.0", False)])
async def test_the_last_lines_of_a_failed_model_are_for_clients_on_loopback(host: str, is_told: bool) -> None:
    models = (ServedModel("ant", "VllmWorker"),)
    async with stage(models=models, host=host) as here:
        here.runtime.instance_id = await here.store.grant(60)
        refusal = Refusal(503, "exit code 3; tried again in 30 s", FOREVER)
        await publish(here, ModelReport("VllmWorker", "failed", refusal=refusal, last_lines="no such file"))
        status, text = await here.post(model="ant")
        assert (status, "exit code 3" in text, "no such file" in text) == (503, True, is_told)


async def queue_book(here: Stage) -> Any:
    """Book a worker of ``ant``, as a request does."""
    ant = here.frontend._models.all[0]
    assert ant.queue is not None
    return await ant.queue.book(ant.router, None, None)


async def test_a_client_that_leaves_waits_no_more() -> None:
    async with serving() as here:
        asked = asyncio.create_task(here.post(model="ant"))
        await wait_for(here, 1)
        asked.cancel()
        await wait_for(here, 0)


async def test_nothing_is_followed_for_routers_by_prefix_where_models_are_loaded_on_request() -> None:
    models = (ServedModel("ant", "VllmWorker"),)
    async with stage(models=models, router="kv", router_replica_sync=True) as here:
        inputs = here.frontend._inputs
        assert (inputs.prefixes, inputs.reported, inputs.tokenizers, inputs.replica_sync) == (None,) * 4
        await here.worker()
        assert (await here.post(model="ant"))[0] == 200


async def test_an_alias_is_asked_for_by_the_models_own_name() -> None:
    async with serving() as here:
        worker = await here.worker()
        status, _ = await here.post(model="emmet")
        assert status == 200
        assert [each["model"] for each in worker.bodies] == ["ant"]


async def test_who_waits_is_refused_with_the_owners_sentence_and_who_comes_later_is_not() -> None:
    async with serving() as here:
        asked = asyncio.create_task(here.post(model="ant"))
        await wait_for(here, 1)
        refusal = Refusal(409, "there is no room for it beside bee: pinned", FOREVER, 3.0)
        await publish(here, ModelReport("VllmWorker", "unloaded", refusal=refusal))
        status, text = await asked
        assert (status, "beside bee" in text) == (409, True)
        await publish(here, ModelReport("VllmWorker", "unloaded", refusal=Refusal(409, "x", 5.0)))
        asked = asyncio.create_task(here.post(model="ant"))
        await wait_for(here, 1)
        await here.worker()
        assert (await asked)[0] == 200


async def test_a_model_that_was_just_added_waits_for_its_first_report_and_is_404_once_that_is_gone() -> None:
    async with serving() as here:
        others = {"roles": {}, "models": {"bee": ModelReport("Bee", "unloaded").to_json()}}
        await here.store.put(fleet_key("ns"), json.dumps(others))
        asked = asyncio.create_task(here.post(model="ant"))
        await wait_for(here, 1)
        await asyncio.sleep(0)
        assert not asked.done()
        await publish(here, ModelReport("VllmWorker", "loading"))
        await here.store.put(fleet_key("ns"), json.dumps(others))
        assert (await asked)[0] == 404


async def test_a_frontend_counts_for_a_worker_that_is_to_sleep_once_it_knows_so() -> None:
    async with serving() as here:
        worker = await here.worker("hold_before")
        answering = asyncio.create_task(here.post(model="ant"))
        await eventually(lambda: worker.in_flight == 1)
        (route,) = [each for each in here.runtime.routes if each.path.startswith("/falling_asleep")]

        async def ask() -> tuple[int, str]:
            request: Any = SimpleNamespace(fields={"instance_id": "1"})
            answer: Any = await route.handler(request)
            return answer.status, answer.body.decode()

        assert (await ask())[0] == 409
        await here.store.put(SLEEP.key("ns", 1), "1")

        async def knows() -> bool:
            return await ask() == (200, '{"in_flight": 1}')

        await eventually(knows)
        worker.go_on.set()
        assert (await answering)[0] == 200
        assert await ask() == (200, '{"in_flight": 0}')


class LateRouter:
    """A router whose worker is there at once for who asks at once, and on ``is_changed`` for who waits."""

    def __init__(self) -> None:
        self.is_changed = asyncio.Event()
        self.is_free = False
        self.check: Any = None

    def book_at_once(self, turn: Any = None) -> Any:
        return "at once" if self.is_free else None

    async def book(self, call: Call, deadline_s: float, check: Any, turn: Any = None) -> Any:
        self.check = check
        await self.is_changed.wait()
        return "waited"


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_wall_clock_that_is_set_makes_no_wait_longer_and_no_use_older(step_s: float) -> None:
    unix_s = 1e9
    queue, router = ModelQueue(ServedModel("ant", "VllmWorker"), lambda: unix_s), LateRouter()
    asked = asyncio.create_task(queue.book(cast(Any, router), None, None))
    await asyncio.sleep(0)
    assert queue.demand(0).waiting == 1
    unix_s += step_s
    await router.check()
    demand = queue.demand(0)
    assert demand.oldest_unix_s == pytest.approx(unix_s, abs=600)
    assert demand.last_use_unix_s == pytest.approx(unix_s, abs=600)
    router.is_changed.set()
    assert "waited" in str(await asked)


async def test_who_comes_while_others_wait_does_not_overtake_them() -> None:
    queue, router = ModelQueue(ServedModel("ant", "VllmWorker")), cast(Any, LateRouter())
    first = asyncio.create_task(queue.book(router, None, None))
    await asyncio.sleep(0)
    router.is_free = True
    second = asyncio.create_task(queue.book(router, None, None))
    await asyncio.sleep(0)
    assert (first.done(), second.done()) == (False, False)
    router.is_changed.set()
    assert "waited" in str(await first)
    assert "waited" in str(await second)
    assert str(await queue.book(router, None, None)) == "at once"


async def test_a_use_is_published_at_once_only_where_the_model_was_said_to_have_nothing_to_do() -> None:
    queue, router = ModelQueue(ServedModel("ant", "VllmWorker")), LateRouter()
    router.is_free, changes = True, list[str]()
    queue.changed = lambda: changes.append("")
    queue.demand(0)
    await queue.book(cast(Any, router), None, None)
    assert len(changes) == 1
    assert queue.demand(1).in_flight == 1
    for _ in range(3):
        await queue.book(cast(Any, router), None, None)
    assert len(changes) == 1, "it is known to answer: the next look is early enough"
    queue.demand(0)
    await queue.book(cast(Any, router), None, None)
    assert len(changes) == 2


async def test_what_is_published_is_parsed_as_often_for_fifty_models_as_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed, loads = list[str](), json.loads

    def count(text: str, **options: Any) -> Any:
        parsed.append(text)
        return loads(text, **options)

    names = [f"m{number}" for number in range(50)]
    queues = [ModelQueue(ServedModel(name, name)) for name in names]
    report = ModelReport("x", "unloaded", why=f"said at {id(queues)}")
    published = json.dumps({"models": {name: report.to_json() for name in names}})
    monkeypatch.setattr(json, "loads", count)
    for queue in queues:
        queue.follow_fleet(published)
    assert all(queue.report == report for queue in queues)
    assert len(parsed) <= 2


async def test_a_demand_that_the_store_has_lost_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "DEMAND_INTERVAL_S", 0.01)
    monkeypatch.setattr(timing, "DEMAND_REWRITE_S", 0.05)
    async with serving() as here:
        asked = asyncio.create_task(here.post(model="ant"))
        await wait_for(here, 1)
        for item in await here.store.list(MODEL_DEMAND.prefix("ns")):
            await here.store.delete(item.key)
        await wait_for(here, 1)
        await here.worker()
        assert (await asked)[0] == 200


async def test_past_its_load_timeout_a_request_is_answered_503() -> None:
    async with serving(load_timeout_s=0.05) as here:
        status, text = await here.post(model="ant")
        assert (status, "within 0.05 s" in text) == (503, True)


async def test_a_request_whose_time_ends_during_a_check_is_told_of_the_load_timeout_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = LoadProgress.check

    async def ends_late(progress: LoadProgress) -> None:
        await check(progress)
        await asyncio.sleep(0.06)

    monkeypatch.setattr(LoadProgress, "check", ends_late)
    async with serving(load_timeout_s=0.05) as here:
        status, text = await here.post(model="ant")
        assert (status, "within 0.05 s" in text) == (503, True)


async def test_a_full_queue_is_answered_429_with_the_time_to_come_again() -> None:
    async with serving(max_queue=1) as here:
        asked = asyncio.create_task(here.post(model="ant"))
        await wait_for(here, 1)
        async with here.client.post(
            here.url + "/v1/completions", json={"model": "ant", "prompt": "a"}
        ) as late:
            assert (late.status, int(late.headers["Retry-After"]) > 0) == (429, True)
        await here.worker()
        assert (await asked)[0] == 200


async def test_a_client_with_a_stream_hears_of_the_load_in_comments_and_then_gets_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "FIRST_COMMENT_S", 0.0)
    async with serving() as here:
        await publish(here, ModelReport("VllmWorker", "loading", 1.0, load_s=41.0))
        async with here.client.post(
            here.url + "/v1/chat/completions",
            json={"model": "ant", "stream": True, "messages": [{"role": "user", "content": "a"}]},
        ) as response:
            line = await response.content.readline()
            assert line.startswith(b": loading ant, ")
            assert line.endswith(b" of about 41 s\n")
            await here.worker()
            rest = await response.text()
        assert rest.endswith("data: [DONE]\n\n")


async def test_a_load_that_fails_after_a_comment_is_an_error_that_the_openai_client_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "FIRST_COMMENT_S", 0.0)
    async with serving() as here:
        client = openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model="ant", messages=[{"role": "user", "content": "a"}], stream=True
        )
        refusal = Refusal(503, "its worker ended", FOREVER)
        await publish(here, ModelReport("VllmWorker", "failed", refusal=refusal))
        with pytest.raises(openai.APIError, match="its worker ended"):
            async for _ in stream:
                pass
        await client.close()


async def test_models_are_listed_with_their_state_and_an_unknown_one_is_refused_at_once() -> None:
    async with serving() as here:
        status, said = await here.get("/health")
        assert (status, json.loads(said)["missing"]) == (503, ["fleet"]), "nobody has said what there is"
        await publish(here, ModelReport("VllmWorker", "loading"))

        async def listed() -> dict[str, str]:
            _, text = await here.get("/v1/models")
            return {each["id"]: each["status"]["value"] for each in json.loads(text)["data"]}

        async def is_loading() -> bool:
            return (await listed())["ant"] == "loading"

        await eventually(is_loading)
        assert await listed() == {"ant": "loading", "emmet": "loading", "bee": "unloaded"}
        assert (await here.post(model="cow"))[0] == 404
        assert (await here.get("/health"))[0] == 200
        assert await demand(here) == ModelDemand()
