"""The router by prefix: the mode kv with what is told or predicted, its books, its choices' measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.gateway.kv_routing.router_inputs import CachedPrefixes, RouterInputs
from dynaplan.gateway.openai_api import COMPLETIONS, Call, parse_call
from dynaplan.gateway.routing.worker_router import WorkerRouter
from dynaplan.store.instances import Instance
from tests.unit.gateway.kv_routing.test_router_inputs import Told

CARD = {"tokenizer": "sim", "kv_block_tokens": 4}
KV = FrontendSettings(router="kv", overlap_weight=1.0)
BLOCK = "0123456789abcdef"
"""Four tokens of the simulated engine: one block."""


class Instances:
    """Discovery's part that a router uses: the instances now, and a call after each change."""

    def __init__(self, *ids: int) -> None:
        self._changed: Callable[[], None] = lambda: None
        self.now = tuple(worker(each) for each in ids)

    def instances(self, component: str) -> tuple[Instance, ...]:
        return self.now

    def on_change(self, callback: Callable[[], None]) -> None:
        self._changed = callback

    def become(self, *ids: int) -> None:
        self.now = tuple(worker(each) for each in ids)
        self._changed()


def worker(instance_id: int) -> Instance:
    return Instance("ns", "W", "generate", instance_id, "http://127.0.0.1:9", f"w{instance_id}", card=CARD)


def router(
    instances: Instances, settings: FrontendSettings = KV, reported: Told | None = None, **more: Any
) -> WorkerRouter:
    prefixes = CachedPrefixes(settings, reported) if settings.router == "kv" else None
    return WorkerRouter(instances, "W", settings, RouterInputs(prefixes), **more)  # type: ignore[arg-type]


def call(prompt: str) -> Call:
    return parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())


async def test_a_prompt_goes_where_its_beginning_was_sent() -> None:
    routed = router(Instances(1, 2, 3))
    first = await routed.book(call(BLOCK * 8), 0.0)
    first.close()
    for turn in range(9, 13):
        booking = await routed.book(call(BLOCK * turn), 0.0)
        assert booking.instance == first.instance
        assert booking.overlap_blocks == turn - 1
        assert booking.prefix_hit_rate == (turn - 1) / turn
        booking.close()


async def test_a_prompt_goes_where_an_engine_says_that_it_is() -> None:
    told = Told({2: 8}, {1, 2})
    routed = router(Instances(1, 2), reported=told)
    for _ in range(2):
        booking = await routed.book(call(BLOCK * 8), 0.0)
        assert (booking.instance.instance_id, booking.overlap_blocks) == (2, 8)
        booking.close()


async def test_a_choice_tells_the_blocks_that_are_there_and_that_were_elsewhere() -> None:
    choices: list[tuple[int, int, int]] = []
    routed = router(
        Instances(1, 2),
        reported=Told({2: 3}, {1, 2}),
        metrics=SimpleNamespace(observe_choice=lambda *numbers: choices.append(numbers)),
    )
    first = await routed.book(call(BLOCK * 8), 0.0)
    second = await routed.book(call(BLOCK * 8), 0.0)
    assert [each.instance.instance_id for each in (first, second)] == [2, 1], (
        "the second costs less elsewhere"
    )
    assert choices == [(8, 3, 3), (8, 0, 3)]


async def test_an_answers_blocks_count_while_it_is_decoded() -> None:
    routed = router(Instances(1, 2))
    long, short = [await routed.book(call(name * 4), 0.0) for name in ("long", "shor")]
    assert long.instance != short.instance
    long.finish_prefill()
    short.finish_prefill()
    long.record_decoded(400)
    for number in range(3):
        booking = await routed.book(call(f"{number}" * 16), 0.0)
        assert booking.instance == short.instance


async def test_with_a_temperature_the_dearer_worker_is_chosen_too() -> None:
    settings = FrontendSettings(router="kv", router_temperature=5.0)
    routed = router(Instances(1, 2), settings, reported=Told({1: 8}, {1, 2}))
    chosen = set()
    for _ in range(200):
        booking = await routed.book(call(BLOCK * 8), 0.0)
        chosen.add(booking.instance.instance_id)
        booking.close()
    assert chosen == {1, 2}


async def test_a_worker_that_left_is_forgotten_with_what_was_sent_there() -> None:
    instances = Instances(1)
    routed = router(instances)
    (await routed.book(call(BLOCK * 8), 0.0)).close()
    instances.become(2)
    booking = await routed.book(call(BLOCK * 8), 0.0)
    assert (booking.instance.instance_id, booking.overlap_blocks) == (2, 0)


async def test_other_modes_cut_no_prompt() -> None:
    routed = router(Instances(1), FrontendSettings(router="round-robin"))
    booking = await routed.book(call(BLOCK * 8), 0.0)
    assert booking.blocks.hashes == ()
    booking.record_decoded(100)
    booking.close()


async def test_a_router_says_how_it_knows_what_each_worker_has_cached() -> None:
    assert router(Instances(1), FrontendSettings(router="least-loaded")).cache_sources() == {}
    off = FrontendSettings(router="kv", kv_events=False)
    assert router(Instances(1), off).cache_sources() == {"w1": "prediction: kv-events is off"}
    instances = Instances(1, 2, 3)
    instances.now = (*instances.now[:2], replace(instances.now[2], card={"tokenizer": "m.gguf"}))
    routed = router(instances, reported=Told({}, {1}))
    assert routed.cache_sources() == {
        "w1": "events",
        "w2": "prediction: its engine tells of no blocks, or events are missing",
        "w3": "prediction: its tokenizer is not known",
    }
