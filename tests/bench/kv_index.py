"""The index of KV blocks beside Dynamo's RadixTree: 8 workers of 50,000 blocks each; and its events.

``DYNAPLAN_DYNAMO_PYTHON`` names a Python that has ``ai-dynamo-runtime`` 1.6.1; without it ours stands alone.
The other one runs this file as a program, and prints its figures as JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

WORKERS, PROMPTS, PROMPT_TOKENS, BLOCK_TOKENS = 8, 268, 3000, 16
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
EVENTS_PER_S, STEP_BLOCKS = 20_000, 64


def rows(repeats: int) -> Iterator[Any]:
    """Ours, and Dynamo's in another process."""
    from tests.bench.table import Row

    aims = {"lookup": 60.0, "hashing and lookup": 200.0, "one block stored or removed": 12.5, "memory": 200.0}
    found = {"": measured(Ours, repeats)}
    if python := os.environ.get("DYNAPLAN_DYNAMO_PYTHON"):
        answer = subprocess.run([python, __file__, str(repeats)], check=True, capture_output=True, text=True)
        found["Dynamo's"] = json.loads(answer.stdout)
    for note, figures in found.items():
        for name, values in figures.items():
            unit = "bytes per block and worker" if name == "memory" else "us of CPU"
            yield Row(f"KV index: {name}", unit, values, None if note else aims[name], note=note)
    for name, values in event_costs(repeats).items():
        yield Row(f"20,000 KV block events/s: {name}", "% of a core", values)


def measured(make: Callable[[], Any], repeats: int) -> dict[str, list[float]]:
    """Lookups of 187 blocks among 400,000, with and without hashing; events; memory."""
    prompts = [_prompt(number) for number in range(WORKERS * PROMPTS)]
    before_bytes = _resident_bytes()
    index = make()
    for number, prompt in enumerate(prompts):
        index.store(number % WORKERS, index.hashes(prompt))
    memory = (_resident_bytes() - before_bytes) / (WORKERS * PROMPTS * PROMPT_BLOCKS)
    asked = prompts[PROMPTS]
    hashes = index.hashes(asked)
    assert index.longest(hashes) == PROMPT_BLOCKS
    changed = [index.hashes(prompt) for prompt in prompts[: WORKERS * 8 : WORKERS]]  # the first worker's

    def change() -> None:
        for each in changed:
            index.remove(0, each)
            index.store(0, each)

    blocks = 2 * len(changed) * PROMPT_BLOCKS
    return {
        "lookup": [_cpu_us(lambda: index.longest(hashes)) for _ in range(repeats)],
        "hashing and lookup": [_cpu_us(lambda: index.longest(index.hashes(asked))) for _ in range(repeats)],
        "one block stored or removed": [_cpu_us(change) / blocks for _ in range(repeats)],
        "memory": [memory],
    }


def event_costs(repeats: int) -> dict[str, list[float]]:
    """The CPU of 20,000 block events a second, half stored and half removed, as steps of 64 and 64.

    The way of the messages between the processes comes on top (``events``): 157 of them a second.
    """
    import msgspec

    messages = [msgspec.msgpack.encode(_engine_message(number)) for number in range(200)]
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, part in _parts(messages).items():
            share = _cpu_us(part, times=1) / (2 * STEP_BLOCKS * len(messages)) * EVENTS_PER_S / 1e6
            found.setdefault(name, []).append(100 * share)
    return found


def _parts(messages: list[bytes]) -> dict[str, Callable[[], None]]:
    """The three stations of these messages, each with what the one before leaves."""
    from dynaplan.engines.kv_events import CachedBlocks, CacheSnapshot, kv_payload, read_kv_payload
    from dynaplan.engines.server.block_events import BlockTranslator
    from dynaplan.events.engine_batches import read_engine_events
    from dynaplan.events.wire_formats import encode_payload, payload_reader
    from dynaplan.routing.kv_index import IndexSync, KvIndex

    translation, cached, following = BlockTranslator(), CachedBlocks(), IndexSync(KvIndex())
    following.set_workers([1])
    for _ in following.load_snapshot(1, following.request_snapshot(1), CacheSnapshot(1, -1, ())):
        pass
    changes: list[Any] = []
    payloads: list[bytes] = []
    read = payload_reader(object)

    def translate() -> None:
        changes.extend(translation.changes(read_engine_events(message)) for message in messages)

    def publish() -> None:
        payloads.extend(encode_payload(kv_payload(cached.events(1, each))) for each in changes)

    def follow() -> None:
        for payload in payloads:
            for event in read_kv_payload(read(payload)):
                following.apply(event)

    return {
        "worker, of vLLM's messages": translate,
        "worker, publishing": publish,
        "frontend, following": follow,
    }


def _engine_message(step: int) -> list[Any]:
    """A step of vLLM that stores the blocks of a prompt, and has removed as many of an earlier one's."""
    names = [
        [number * STEP_BLOCKS + place + 2**63 for place in range(STEP_BLOCKS)] for number in (step, step - 8)
    ]
    stored = {
        "type": "BlockStored",
        "block_hashes": names[0],
        "parent_block_hash": None,
        "token_ids": random.Random(step).choices(range(128_000), k=STEP_BLOCKS * BLOCK_TOKENS),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "extra_keys": [None] * STEP_BLOCKS,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    removed = {"type": "BlockRemoved", "block_hashes": names[1], "medium": "GPU", "group_idx": 0}
    return [0.0, [removed, stored], 0]


class Ours:
    """dynaplan's."""

    def __init__(self) -> None:
        from dynaplan.engines.timing_model.kv_blocks import block_hashes
        from dynaplan.routing.kv_index import KvIndex

        self._index = KvIndex()
        self._hashes = block_hashes
        self.store = self._index.add
        self.remove = self._index.remove

    def hashes(self, prompt: list[int]) -> list[int]:
        return self._hashes(prompt, BLOCK_TOKENS)

    def longest(self, hashes: list[int]) -> int:
        return max(self._index.overlaps(hashes).values())


class Dynamos:
    """Dynamo's tree knows blocks by their own hashes, under their parents, and takes events as JSON."""

    def __init__(self) -> None:
        from dynamo.llm import (  # type: ignore[import-not-found]
            RadixTree,
            compute_block_hash_for_seq,
        )

        self._tree = RadixTree()
        self._hashes = compute_block_hash_for_seq
        self._events = 0

    def hashes(self, prompt: list[int]) -> list[int]:
        return list(self._hashes(prompt, BLOCK_TOKENS))

    def store(self, worker: int, hashes: list[int]) -> None:
        blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
        self._apply(worker, {"stored": {"parent_hash": None, "blocks": blocks}})

    def remove(self, worker: int, hashes: list[int]) -> None:
        self._apply(worker, {"removed": {"block_hashes": hashes[::-1]}})

    def longest(self, hashes: list[int]) -> int:
        return int(max(self._tree.find_matches(hashes).scores.values()))

    def _apply(self, worker: int, data: dict[str, Any]) -> None:
        self._events += 1
        event = {"event_id": self._events, "data": data, "dp_rank": 0}
        self._tree.apply_event(worker, json.dumps(event).encode())


def _prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(128_000), k=PROMPT_TOKENS)


def _cpu_us(call: Callable[[], object], times: int = 50) -> float:
    taken = []
    for _ in range(times):
        begun_ns = time.process_time_ns()
        call()
        taken.append(time.process_time_ns() - begun_ns)
    return statistics.median(taken) / 1000


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(measured(Dynamos, int(sys.argv[1]))))
