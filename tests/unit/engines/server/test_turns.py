"""Engines without GPUs start side by side where their memory is given, and in turns where they measure it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dynaplan.engines.llamacpp.launch_line import KIND as LLAMACPP
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server import engine as module
from dynaplan.engines.server.engine import ServerEngine
from dynaplan.engines.server.kind import ServerKind
from dynaplan.engines.sglang import KIND as SGLANG
from dynaplan.engines.vllm import KIND as VLLM
from dynaplan.process.memory import BoxMemory

GIB = 2**30


@pytest.mark.parametrize(
    ("kind", "space", "free_gib", "gpus", "is_beside"),
    [
        (VLLM, "1", 24, "", True),
        (VLLM, "1", 5, "", False),  # two take 3 GiB each
        (VLLM, "", 24, "", False),
        (VLLM, "auto", 24, "", False),
        (VLLM, "1", 24, "GPU-a", False),
        (SGLANG, "1", 24, "", False),
        (LLAMACPP, "", 0, "", True),
    ],
)
async def test_a_second_engine_starts_beside_the_first_where_cores_and_memory_bear_it(
    kind: ServerKind,
    space: str,
    free_gib: int,
    gpus: str,
    is_beside: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(module, "box_memory", lambda: BoxMemory(32 * GIB, free_gib * GIB))
    engine = ServerEngine(kind, {"model": "/models/m"}, EngineContext("ns_W"))
    async with engine._turn_to_start(tmp_path):
        second = asyncio.create_task(start(engine, tmp_path))
        await asyncio.wait({second}, timeout=0.3)
        assert second.done() == is_beside
    await second


async def start(engine: ServerEngine, directory: Path) -> None:
    async with engine._turn_to_start(directory):
        pass
