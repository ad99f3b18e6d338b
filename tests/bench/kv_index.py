"""The index of KV blocks beside Dynamo's RadixTree: 8 workers of 50,000 blocks each.

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


class Ours:
    """dynaplan's."""

    def __init__(self) -> None:
        from dynaplan.core.engine.block_hashes import block_hashes
        from dynaplan.core.routing.kv_index import KvIndex

        self._index = KvIndex()
        self._hashes = block_hashes
        self.store = self._index.stored
        self.remove = self._index.removed

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
