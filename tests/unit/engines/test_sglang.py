"""SGLang's adapter against its flags, its metrics and its hand-off, none of which is run here.

``tests/fixtures/engines/sglang``: the flags of SGLang 0.5.23's own argument parser, and what its own metrics
collectors write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaplan.engines import sglang
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server.metrics import read_metrics
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import PermanentError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "sglang"
PORTS = (18000, 18001, 18002)
TOKEN = "the-worker-token"


def context(**fields: Any) -> EngineContext:
    return EngineContext("ns_VllmWorker", token=TOKEN, scratch_dir="/dev/shm/dynaplan", **fields)


def words(options: Mapping[str, Any], **fields: Any) -> tuple[str, ...]:
    return sglang.KIND.command({"model": "m", **options}, context(**fields), PORTS).argv


def value(argv: Sequence[str], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def test_nccl_has_a_leased_port_too_and_the_metrics_are_switched_on() -> None:
    argv = words({})
    assert value(argv, "--nccl-port") == "18001"
    assert "--enable-metrics" in argv


def test_the_api_key_is_in_a_file_of_the_worker_and_nowhere_else() -> None:
    launch = sglang.KIND.command({"model": "m"}, context(), PORTS)
    ((path, text),) = launch.files.items()
    assert path == Path("/dev/shm/dynaplan/ns_VllmWorker.sglang.yaml"), "its suffix is one that SGLang reads"
    assert yaml.safe_load(text) == {"api-key": TOKEN}
    assert value(launch.argv, "--config") == str(path)
    assert TOKEN not in " ".join(launch.argv)
    assert TOKEN not in launch.environment.values()


def test_its_kv_transport_listens_on_this_machine_only_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert sglang.KIND.command({"model": "m"}, context(), PORTS).environment["UCX_NET_DEVICES"] == "lo"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert "UCX_NET_DEVICES" not in sglang.KIND.command({"model": "m"}, context(), PORTS).environment


def test_it_holds_nothing_so_nobody_need_tell_it_that_a_hand_off_was_taken() -> None:
    assert not sglang.KIND.make({"model": "m"}, context()).waits_for_release


def test_looking_at_its_health_generates_nothing() -> None:
    environment = sglang.KIND.command({"model": "m"}, context(), PORTS).environment
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_without_chunks_the_token_budget_is_that_of_a_batch() -> None:
    argv = words({"enable-chunked-prefill": False, "max-num-batched-tokens": 2048})
    assert value(argv, "--chunked-prefill-size") == "-1"
    assert value(argv, "--max-prefill-tokens") == "2048"


@pytest.mark.parametrize(("wanted", "is_off"), [(False, True), (True, False), (None, False)])
def test_the_prefix_cache_is_on_unless_switched_off(wanted: bool | None, is_off: bool) -> None:
    assert ("--disable-radix-cache" in words({"enable-prefix-caching": wanted})) is is_off


def test_a_worker_of_an_aggregated_graph_does_both() -> None:
    assert not [word for word in words({}) if "disaggregation" in word]
    assert sglang.KIND.ports_needed({}, context()) == 2


def test_a_prefill_worker_opens_a_bootstrap_server_on_its_leased_port() -> None:
    argv = words({}, role="prefill")
    assert value(argv, "--disaggregation-mode") == "prefill"
    assert value(argv, "--disaggregation-bootstrap-port") == "18002"
    assert sglang.KIND.ports_needed({}, context(role="prefill")) == len(PORTS)


@pytest.mark.parametrize(
    ("options", "role", "expected"),
    [({}, "decode", False), ({"remote-prefill": True}, "decode", True), ({}, "prefill", False)],
)
def test_the_frontend_is_told_that_such_a_decode_worker_needs_a_hand_off(
    options: dict[str, Any], role: str, expected: bool
) -> None:
    engine = sglang.KIND.make({"model": "m", **options}, context(role=role))
    assert engine.card().get("requires_remote_prefill", False) is expected


def test_a_decode_worker_of_a_disaggregated_graph_only_decodes() -> None:
    argv = words({"remote-prefill": True})
    assert value(argv, "--disaggregation-mode") == "decode"
    assert "--disaggregation-bootstrap-port" not in argv
    assert value(argv, "--disaggregation-transfer-backend") == "nixl"
    given = {"remote-prefill": True, "disaggregation-transfer-backend": "mooncake"}
    assert value(words(given), "--disaggregation-transfer-backend") == "mooncake"


def test_the_model_is_known_by_its_given_name_or_the_last_part_of_its_path() -> None:
    assert value(words({"model": "/models/tiny"}), "--served-model-name") == "tiny"
    assert value(words({"model": "org/tiny"}), "--served-model-name") == "org/tiny"
    assert value(words({"served-model-name": "x"}), "--served-model-name") == "x"


@pytest.mark.parametrize(("role", "waiting"), [("prefill", 3 + 2 + 4), ("decode", 3 + 6 + 7)])
def test_requests_that_wait_for_the_other_side_count_as_waiting(role: str, waiting: int) -> None:
    signals = read_metrics((FIXTURES / f"metrics_{role}.txt").read_text(), sglang.METRIC_NAMES)
    assert signals.waiting == waiting


class Prefiller:
    """Copies a prefill server of SGLang: it answers when a decode server has met it in the room."""

    def __init__(self) -> None:
        self.body: Mapping[str, Any] = {}
        self.is_met = asyncio.Event()

    async def ask(self, path: str, body: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        self.body = body
        await self.is_met.wait()
        return {"choices": [{"finish_reason": "length"}]}


REQUEST = RemotePrefillRequest(
    "id-1",
    path="/v1/chat/completions",
    body={
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
)


async def test_both_sides_work_at_once_and_meet_in_one_room() -> None:
    engine = Prefiller()
    told: list[Mapping[str, Any]] = []

    async def decode(fields: Mapping[str, Any]) -> None:
        told.append(fields)

    working = asyncio.create_task(sglang.KIND.prefill(REQUEST, decode, engine.ask, PORTS))
    async with asyncio.timeout(5):
        while not engine.body:
            await asyncio.sleep(0)
        assert told and not working.done(), "the decode side is told while the prompt is being computed"
        engine.is_met.set()
        await working
    (fields,) = told
    assert fields["bootstrap_host"] == "127.0.0.1" and fields["bootstrap_port"] == PORTS[2]
    assert 0 <= fields["bootstrap_room"] < 2**63
    assert engine.body == {
        "messages": REQUEST.body["messages"],
        "max_tokens": 50,
        "stream": False,
        **fields,
    }


async def test_every_request_has_a_room_of_its_own() -> None:
    rooms: list[int] = []

    async def hand_off_ready(fields: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        rooms.append(fields["bootstrap_room"])

    engine = Prefiller()
    engine.is_met.set()
    for _ in range(50):
        await sglang.KIND.prefill(REQUEST, hand_off_ready, engine.ask, PORTS)
    assert len(set(rooms)) == 50


async def test_a_prompt_that_sglang_refuses_fails() -> None:
    async def hand_off_ready(fields: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        pass

    async def ask(path: str, body: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        raise PermanentError("the engine answered id-1 with 400: too long")

    with pytest.raises(PermanentError, match="too long"):
        await sglang.KIND.prefill(REQUEST, hand_off_ready, ask, PORTS)


def test_nothing_is_held_after_a_prefill_because_sglang_answers_when_it_is_transferred() -> None:
    assert sglang.KIND.prefills and not sglang.KIND.holds_hand_offs
