"""The engine that the guide adds is whole: it is installed as it stands there, and its server is a stand-in.

One module and one entry point are all of it: no file of dynaplan names it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynaplan.config.stock import matching_options
from dynaplan.engines import registry
from dynaplan.engines.model_files import absolute_path
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server import child
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import ConfigError
from tests.fakes.engine_server import COMMAND
from tests.guides.reading import fenced
from tests.unit.house.source import REPOSITORY

GUIDE = REPOSITORY / "docs/guides/engines.md"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The guide's module and entry point as pip lays them out."""
    (source,) = (block for block in fenced(GUIDE, "python") if "ServerKind" in block)
    (points,) = (block for block in fenced(GUIDE, "ini") if "dynaplan.engines" in block)
    site = tmp_path / "site"
    information = site / "fast-1.dist-info"
    information.mkdir(parents=True)
    (site / "fast.py").write_text(source)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fast\nVersion: 1\n")
    entry = points.partition("dynaplan.engines =")[2]
    (information / "entry_points.txt").write_text(f"[dynaplan.engines]\n{entry.strip()}\n")
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("fast", None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(child, "READY_POLL_S", 0.02)


async def test_it_starts_answers_prefills_for_others_and_ends(installed: None, tmp_path: Path) -> None:
    options = {"model": "m", "fast-command": COMMAND, "shutdown-timeout": 1, "max-model-len": 512}
    registry.check_engine("fast", options, 1)
    context = EngineContext("ns_w", "prefill", token="key", scratch_dir=str(tmp_path))
    engine = registry.make_engine("fast", options, context)
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


def test_it_refuses_what_it_sets_itself(installed: None) -> None:
    with pytest.raises(ConfigError, match="port cannot be set with engine fast"):
        registry.check_engine("fast", {"model": "m", "port": 8000}, 1)


def test_it_is_a_citizen_frontends_the_rules_of_many_models_and_the_check_of_both_sides_know_it(
    installed: None, tmp_path: Path
) -> None:
    (fault,) = [registry.engine_kind("fast").api.fault({"template": "{{ 1 }}"})]
    assert fault and "the model has its own" in fault.message
    assert absolute_path("fast", "./weights", tmp_path) == str(tmp_path / "weights")
    with pytest.raises(ConfigError, match="which is not installed"):
        registry.check_engine("fast", {"model": "org/model"}, 1)
    assert "model" in matching_options("fast")
