"""TensorRT-LLM's adapter against its flags, its metric names and its hand-off, none of which is run here.

``tests/fixtures/engines/trtllm``: the options of ``trtllm-serve`` and a metrics text, both from its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaplan.engines import trtllm
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server.engine_watchdog import EngineWatchdog
from dynaplan.engines.server.metrics import EngineMetrics, read_metrics
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import PermanentError, TemporaryError
from tests.fakes.clock import ManualClock

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "trtllm"
PORTS = (18000,)
FILE = Path("/dev/shm/dynaplan/ns_VllmWorker.trtllm.yaml")


def context(**fields: Any) -> EngineContext:
    return EngineContext("ns_VllmWorker", token="secret", scratch_dir=str(FILE.parent), **fields)


def words(options: Mapping[str, Any], **fields: Any) -> tuple[str, ...]:
    return trtllm.KIND.command({"model": "m", **options}, context(**fields), PORTS).argv


def written(options: Mapping[str, Any], **fields: Any) -> Any:
    launch = trtllm.KIND.command({"model": "m", **options}, context(**fields), PORTS)
    assert list(launch.files) == [FILE]
    return yaml.safe_load(launch.files[FILE])


def value(argv: Sequence[str], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def test_the_pytorch_backend_reads_the_file() -> None:
    argv = words({})
    assert value(argv, "--backend") == "pytorch"
    assert value(argv, "--extra_llm_api_options") == str(FILE)


def test_the_metrics_are_switched_on() -> None:
    assert written({}) == {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    assert trtllm.KIND.metrics_path == "/prometheus/metrics"


def test_options_of_the_kv_cache_stand_together_in_the_file() -> None:
    options = {
        "gpu-memory-utilization": 0.5,
        "block-size": 64,
        "enable-prefix-caching": False,
        "kv-cache-dtype": "fp8",
    }
    assert written(options)["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.5,
        "tokens_per_block": 64,
        "enable_block_reuse": False,
        "dtype": "fp8",
    }


def test_what_the_section_says_of_the_file_is_merged_over_ours() -> None:
    extra = {"kv_cache_config": {"dtype": "fp8"}, "return_perf_metrics": False, "enable_attention_dp": True}
    document = written({"block-size": 32, "extra-llm-api-options": extra})
    assert document["kv_cache_config"] == {"tokens_per_block": 32, "dtype": "fp8"}
    assert document["enable_attention_dp"] is True
    assert document["return_perf_metrics"] is False
    assert written({"extra-llm-api-options": '{"dtype": "bfloat16"}'})["dtype"] == "bfloat16"


def test_both_sides_of_a_disaggregated_graph_have_a_cache_transceiver() -> None:
    expected = {"backend": "DEFAULT", "max_tokens_in_buffer": 4096}
    decode = written({"remote-prefill": True, "max-model-len": 4096})
    prefill = written({"max-model-len": 4096}, role="prefill")
    assert decode["cache_transceiver_config"] == prefill["cache_transceiver_config"] == expected
    assert prefill["disable_overlap_scheduler"] is True
    assert "disable_overlap_scheduler" not in decode
    assert "cache_transceiver_config" not in written({})


async def test_values_that_stand_still_are_no_standstill() -> None:
    """The server brings its metrics up to date when a request ends: nothing moves within a long one."""
    signals = read_metrics((FIXTURES / "metrics.txt").read_text(), trtllm.METRIC_NAMES)

    async def read() -> EngineMetrics:
        return signals

    clock = ManualClock()
    watch = EngineWatchdog(read, clock, hang_timeout_s=2.0)
    for _ in range(10):
        clock.advance(1.0)
        await watch.poll()
    assert not watch._hung.is_set()


def test_clients_may_use_the_name_that_it_is_served_by_which_it_is_not_told() -> None:
    """It answers whatever model a request names, and has no flag for a name of its own."""
    options = {"model": "/models/tiny", "served-model-name": "public"}
    assert "public" not in words(options)
    engine = trtllm.KIND.make(options, context())
    engine._model = {"id": "tiny"}  # as it says once it runs
    assert engine.card()["model"] == "public"
    unnamed = trtllm.KIND.make({"model": "/models/tiny"}, context())
    unnamed._model = {"id": "tiny"}
    assert unnamed.card()["model"] == "tiny"


async def test_its_count_of_requests_is_not_relied_upon() -> None:
    engine = trtllm.KIND.make({"model": "m"}, context())
    with pytest.raises(PermanentError, match="does not tell how many requests"):
        await engine.count_requests()


REQUEST = RemotePrefillRequest(
    "id-1",
    path="/v1/completions",
    body={"prompt": "hello", "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}},
)
OPAQUE = {"first_gen_tokens": [7], "ctx_request_id": 12, "encoded_opaque_state": "AAEC", "ctx_dp_rank": 0}


class Prefiller:
    """Copies a context server of TensorRT-LLM: the answer's choice says how to take its KV entries over."""

    def __init__(self, finish_reason: str = "length") -> None:
        self.finish_reason = finish_reason
        self.body: Mapping[str, Any] = {}

    async def ask(self, path: str, body: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        self.body = body
        asked = body.get("disaggregated_params")
        hand_off = {"disaggregated_params": {**asked, **OPAQUE}} if asked else {}
        return {"choices": [{"text": "x", "finish_reason": self.finish_reason, **hand_off}]}


async def prefilled(engine: Prefiller, request: RemotePrefillRequest = REQUEST) -> Mapping[str, Any]:
    """The fields that the decode side is told."""
    told: list[Mapping[str, Any]] = []

    async def hand_off_ready(fields: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        assert engine.body, "the decode side is told when the prompt is computed, not before"
        told.append(fields)

    await trtllm.KIND.prefill(request, hand_off_ready, engine.ask, PORTS)
    (fields,) = told
    return fields


async def test_the_prompt_is_computed_first_and_its_answer_goes_to_the_decode_side() -> None:
    engine = Prefiller()
    fields = await prefilled(engine)
    asked = engine.body["disaggregated_params"]
    assert asked["request_type"] == "context_only"
    assert 2**40 <= asked["disagg_request_id"] < 2**63
    assert engine.body["max_tokens"] == 1 and engine.body["stream"] is False
    assert "stream_options" not in engine.body
    assert fields == {
        "disaggregated_params": {
            **OPAQUE,
            "request_type": "generation_only",
            "disagg_request_id": asked["disagg_request_id"],
        }
    }


async def test_only_one_of_the_two_names_of_the_token_limit_is_sent() -> None:
    engine = Prefiller()
    body = {"messages": [], "max_completion_tokens": 50}
    await prefilled(engine, RemotePrefillRequest("id-1", path="/v1/chat/completions", body=body))
    assert engine.body["max_completion_tokens"] == 1
    assert "max_tokens" not in engine.body


async def test_an_answer_of_one_token_is_left_to_the_decode_side_as_a_whole() -> None:
    with pytest.raises(TemporaryError, match="nothing to hand over"):
        await prefilled(Prefiller(finish_reason="stop"))


async def test_an_answer_without_a_hand_off_is_left_to_the_decode_side_as_a_whole() -> None:
    async def ask(path: str, body: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        return {"choices": [{"text": "x", "finish_reason": "length"}]}

    async def hand_off_ready(fields: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        raise AssertionError("there is nothing to hand over")

    with pytest.raises(TemporaryError, match="has no disaggregated_params"):
        await trtllm.KIND.prefill(REQUEST, hand_off_ready, ask, PORTS)
