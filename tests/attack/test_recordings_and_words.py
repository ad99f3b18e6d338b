"""Recordings, leases, a child's words and Prometheus' answers: whatever is in them, a value or a sentence."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.engines.llamacpp import server_main
from dynaplan.planner.metrics.exposition import traffic_of
from dynaplan.planner.metrics.prometheus import PrometheusTraffic
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.replay import replay
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.explain import explain, is_change
from dynaplan.process.port_leases import lease_ports
from dynaplan.util.errors import DeploymentError
from dynaplan.util.sockets import quiet_ports
from tests.attack.fuzzing import anything, json_text, mutated, text_of, total
from tests.attack.test_files import directory, is_said
from tests.unit.planner.rules.situations import interval


def recorded() -> dict[str, Any]:
    """The record of one decision of a load planner, under a hold."""
    settings = PlannerSettings()
    observation = replace(interval(1, 2, kv=0.95), holds=RoleHolds(decode=Hold(1, 3, by="alice")))
    state, decision = decide(settings, PlannerState(), observation)
    record = DecisionRecord(
        "2026-01-01T00:00:00+00:00", settings, PlannerState(), observation, decision, state
    )
    document: dict[str, Any] = record.to_json()
    return document


RECORD = recorded()


@total
@given(data=st.data())
def test_a_recorded_decision_is_replayed_or_refused_and_always_explained(data: st.DataObject) -> None:
    document = mutated(RECORD, data.draw)
    if isinstance(document, dict):
        assert explain(document)
        assert is_change(document) in (True, False)
    with directory() as at:
        file = at / "decisions.jsonl"
        lines = json.dumps(document) + "\n" + json_text(RECORD, data.draw) + "\n" + json.dumps(RECORD)
        file.write_bytes(lines.encode("utf-8", "surrogatepass"))
        is_said(lambda: replay(file, {}))


KINDS = ("file", "folder", "link", "pipe")


@total
@given(
    there=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 70000)), max_size=4),
    count=st.integers(1, 3),
)
def test_ports_are_leased_beside_anything_that_has_a_leases_name(
    there: list[tuple[str, int]], count: int
) -> None:
    with directory() as at:
        for kind, port in there:
            path = at / f"port-{port}.lock"
            if path.exists() or path.is_symlink():
                continue
            if kind == "file":
                path.write_bytes(b"\xff" * (port % 100))
            elif kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(path)
            else:
                os.mkfifo(path)
        with lease_ports(count, at) as lease:
            assert len(set(lease.ports)) == count


def test_where_every_port_is_taken_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest, _ = quiet_ports()
    monkeypatch.setattr("dynaplan.process.port_leases.quiet_ports", lambda: (lowest, lowest + 2))
    for port in range(lowest, lowest + 3):
        (tmp_path / f"port-{port}.lock").mkdir()
    with pytest.raises(DeploymentError, match="no 2 free loopback ports"):
        lease_ports(2, tmp_path)


WORDS = ("2", "--port=40001", '--model.path="m.gguf"', "--n_parallel=4", '--hostname="127.0.0.1"')


@total
@given(data=st.data())
def test_the_words_of_llamacpps_child_are_taken_or_refused(data: st.DataObject) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")

    def refuse(_: object) -> None:
        raise RuntimeError("no model")

    words = list(WORDS)
    for _ in range(data.draw(st.integers(0, 2))):
        words[data.draw(st.integers(0, len(words) - 1))] = text_of(
            data.draw(st.sampled_from(WORDS)), data.draw
        )
    if data.draw(st.booleans()):
        name = data.draw(
            st.sampled_from(["model.path", "n_parallel", "port", "sampling.temp", "sampling", "x", ""])
        )
        words.append(f"--{name}={json.dumps(data.draw(anything))}")
    words = words[data.draw(st.sampled_from([0, 0, 0, 1, len(words)])) :]
    params = xllamacpp.CommonParams
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "xllamacpp", SimpleNamespace(CommonParams=params, Server=refuse))
        assert server_main.main(words) in range(1000)


def answer() -> dict[str, Any]:
    """An answer to ``query``, as Prometheus gives it."""

    def series(name: str, value: str, **labels: str) -> dict[str, Any]:
        return {"metric": {"is": name, "dynamo_namespace": "ns", **labels}, "value": [1795348800.1, value]}

    result = [
        series("requests", "12.5"),
        series("refused", "1"),
        series("time_to_first_token_seconds_sum", "3.5"),
        series("time_to_first_token_seconds_count", "12"),
        series("input_sequence_tokens_bucket", "7", le="128"),
        series("input_sequence_tokens_bucket", "12", le="+Inf"),
        series("samples", "4"),
    ]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


class Response:
    """A response of a server, whatever it says."""

    def __init__(self, text: str) -> None:
        self.status = 200
        self._text = text

    async def read(self) -> bytes:
        return self._text.encode("utf-8", "surrogatepass")

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@total
@given(data=st.data())
def test_any_answer_of_prometheus_is_traffic_or_none_with_a_reason(data: st.DataObject) -> None:
    text = json_text(answer(), data.draw)
    source = PrometheusTraffic("http://127.0.0.1:9", "ns")
    source._session = SimpleNamespace(post=lambda *_, **__: Response(text))  # type: ignore[assignment]
    traffic = asyncio.run(source.traffic(60.0))
    if traffic.requests is None:
        assert 0 < len(traffic.missing) < 1000
        return
    numbers: Mapping[str, float | None] = {
        "requests": traffic.requests,
        "isl": traffic.isl_tokens,
        "ttft": traffic.ttft_ms,
        "itl": traffic.itl_ms,
    }
    assert all(number is None or math.isfinite(number) for number in numbers.values()), numbers
    assert traffic_of(60.0, {}) is not None
