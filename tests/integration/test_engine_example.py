"""The engine that the guide adds is whole: it is run as it stands there, with a stand-in for its server."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from dynaplan.engines.port import EngineContext
from dynaplan.engines.server import child
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import ConfigError
from tests.fakes.engine_server import COMMAND
from tests.guides.reading import fenced
from tests.unit.house.source import REPOSITORY

GUIDE = REPOSITORY / "docs/guides/engines.md"


@pytest.fixture
def fast() -> ModuleType:
    """The module of the guide."""
    (source,) = (block for block in fenced(GUIDE, "python") if "EngineKind" in block)
    module = ModuleType("fast")
    exec(compile(ast.parse(source), str(GUIDE), "exec"), vars(module))
    return module


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(child, "READY_POLL_S", 0.02)


async def test_it_starts_answers_prefills_for_others_and_ends(fast: ModuleType, tmp_path: Path) -> None:
    options = {"model": "m", "fast-command": COMMAND, "shutdown-timeout": 1, "max-model-len": 512}
    fast.check(options, 1)
    engine = fast.make(options, EngineContext("ns_w", "prefill", token="key", scratch_dir=str(tmp_path)))
    handed: list[Mapping[str, Any]] = []

    async def hand_off_ready(fields: Mapping[str, Any], cached_tokens: int | None) -> None:
        handed.append(fields)
        engine.release("r1")

    await engine.start()
    try:
        body = {"model": "m", "prompt": "one two", "max_tokens": 2}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{engine.url}/v1/completions", json=body) as response,
        ):
            assert response.status == 200
        await engine.prefill(RemotePrefillRequest("r1", path="/v1/completions", body=body), hand_off_ready)
        assert [list(fields) for fields in handed] == [["kv_transfer_params"]]
    finally:
        await engine.stop()


def test_it_refuses_what_it_sets_itself(fast: ModuleType) -> None:
    with pytest.raises(ConfigError, match="port cannot be set with engine fast"):
        fast.check({"model": "m", "port": 8000}, 1)
