"""Whatever an engine answers, its worker and its frontends go on: a bad value is none, or an error."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.engines import trtllm, vllm
from dynaplan.engines.llamacpp.launch_line import METRIC_NAMES as LLAMACPP
from dynaplan.engines.llamacpp.slots import SlotAllocator, SlotFiles, SlotPool
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server.client import _object
from dynaplan.engines.server.kind import ServerKind
from dynaplan.engines.server.metrics import read_metrics
from dynaplan.engines.sglang import METRIC_NAMES as SGLANG
from dynaplan.engines.sim.api import read_request
from dynaplan.engines.vllm import KIND as VLLM
from dynaplan.engines.vllm import METRIC_NAMES
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.gateway.engine_answers import count_chat_tokens, find_failure, find_usage, is_aborted
from dynaplan.gateway.openai_api import ApiError
from dynaplan.gateway.routing.reservation import _read_fields
from dynaplan.gateway.upstream import WorkerDied
from dynaplan.planner.metrics.exposition import Exposition, increase, traffic_of
from dynaplan.store.instances import Instance
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import TemporaryError, UserError
from tests.attack.fuzzing import bytes_of, json_text, mutated, text_of, total

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"
NAMES = {"vllm": METRIC_NAMES, "llamacpp": LLAMACPP, "sglang": SGLANG, "trtllm": trtllm.KIND.metric_names}
METRICS = [next(iter(sorted((ENGINES / name).glob("metrics*.txt")))) for name in NAMES]
STREAMS = [ENGINES / "vllm" / "abort.sse", ENGINES / "llamacpp" / "chat.sse"]
MODELS = json.loads((ENGINES / "vllm" / "models.json").read_text())
PREFILL = json.loads((ENGINES / "vllm" / "prefill.json").read_text())
SLOTS = json.loads((ENGINES / "llamacpp" / "slots_busy.json").read_text())
REQUEST = RemotePrefillRequest("r", body={"prompt": "hi"})


@pytest.mark.parametrize("path", METRICS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@total
@given(data=st.data())
def test_signals_are_read_from_any_metrics_and_travel_as_a_load(path: Path, data: st.DataObject) -> None:
    signals = read_metrics(text_of(path.read_text(), data.draw), NAMES[path.parent.name])
    load = signals.load(8)
    assert WorkerLoad.from_json(parse_object(json.dumps(load.to_json()))) == load
    assert 0 <= signals.kv_usage <= 1
    assert all(map(math.isfinite, signals.samples.values()))


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@total
@given(data=st.data())
def test_any_event_of_a_stream_is_counted_and_a_failure_in_it_is_an_error(
    path: Path, data: st.DataObject
) -> None:
    events = bytes_of(path.read_bytes(), data.draw)
    assert count_chat_tokens(events) >= 0
    find_usage(events)
    is_aborted(events)
    if failure := find_failure(events):
        json.loads(failure.to_api_error().to_json())


@total
@given(data=st.data())
def test_an_error_event_of_any_form_is_an_error_of_openais_form(data: st.DataObject) -> None:
    real = {"error": {"message": "no", "type": "x", "param": None, "code": 400}}
    text = json_text(real, data.draw).replace("\n", " ")
    failure = find_failure(b"data: {} " + text.encode("utf-8", "replace") + b"\n\n") or find_failure(
        b"data: " + text.encode("utf-8", "replace") + b"\n\n"
    )
    if failure:
        error = failure.to_api_error()
        assert 400 <= error.status < 600
        json.loads(error.to_json())


@total
@given(digits=st.integers(1, 6000), name=st.sampled_from(["prompt", "completion", "cached"]))
def test_a_usage_of_any_size_is_read_or_not_stated(digits: int, name: str) -> None:
    usage = find_usage(b'"usage":{"completion_tokens":1,"%b_tokens":%b}' % (name.encode(), b"9" * digits))
    timings = find_usage(b'"timings":{"cache_n":1,"prompt_n":%b,"x":1,"predicted_n":1}' % (b"9" * digits))
    assert all(number is None or number <= 10**16 for number in (usage.input_tokens, timings.input_tokens))


@total
@given(data=st.data())
def test_an_answer_to_a_question_is_an_object_or_a_temporary_error(data: st.DataObject) -> None:
    try:
        assert isinstance(_object(json_text(PREFILL, data.draw), "/x"), dict)
    except TemporaryError as error:
        assert len(str(error)) < 1000


KINDS = [vllm.KIND, trtllm.KIND]


@pytest.mark.parametrize("kind", KINDS, ids=["vllm", "trtllm"])
@total
@given(data=st.data())
def test_any_answer_to_a_prefill_is_handed_over_or_a_temporary_error(
    kind: ServerKind, data: st.DataObject
) -> None:
    choice = {"disaggregated_params": {"ctx_request_id": 1}, "finish_reason": "length"}
    answer = mutated({**PREFILL, "choices": [choice]}, data.draw)
    handed: list[Any] = []

    async def ask(*_: Any) -> Any:
        return answer if isinstance(answer, dict) else {}

    async def hand_off_ready(fields: Any, cached_tokens: int | None = None, /) -> None:
        handed.append(json.dumps(dict(fields)))

    try:
        asyncio.run(kind.prefill(REQUEST, hand_off_ready, ask, (1, 2)))
        assert len(handed) == 1
    except TemporaryError:
        assert not handed


class Server:
    """A server that answers one text whatever it is asked."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def text(self, path: str, timeout_s: float) -> str:
        return self._text


@total
@given(data=st.data())
def test_any_description_of_slots_is_read_or_a_temporary_error(data: st.DataObject) -> None:
    async def refresh() -> None:
        server = Server(json_text(SLOTS, data.draw))
        pool, files = SlotPool(4, lambda: 0.0, 10), SlotFiles("", "w")
        allocator = SlotAllocator(cast(Any, server), pool, files, 4, cast(Any, None))
        try:
            for slot in await allocator.refresh():
                assert {type(slot.number), type(slot.context_tokens), type(slot.used_tokens)} == {int}
                assert type(slot.is_computing) is bool
        except TemporaryError as error:
            assert len(str(error)) < 1000

    asyncio.run(refresh())


@total
@given(data=st.data())
def test_a_card_made_of_any_list_of_models_can_be_registered(data: st.DataObject) -> None:
    async def card() -> None:
        engine = cast(Any, VLLM.make({"model": "m"}, EngineContext("w", token="t")))
        text = json_text(MODELS, data.draw)

        async def models(path: str) -> dict[str, Any]:
            return _object(text, path)

        engine._client.json = models
        engine._model = await engine._first_model()
        instance = Instance("ns", "C", "generate", 1, "http://x", "w", 1, engine.card())
        assert Instance.from_json(instance.to_json()).card == instance.card

    asyncio.run(card())


@total
@given(data=st.data())
def test_fields_of_a_reservation_are_an_object_or_the_worker_has_failed(data: st.DataObject) -> None:
    text = json_text({"fields": {"id_slot": 1, "cache_prompt": True}}, data.draw)
    try:
        assert isinstance(_read_fields(text.encode("utf-8", "surrogatepass")), dict)
    except WorkerDied as error:
        assert len(str(error)) < 1500


HAND_OFF = {
    "model": "m",
    "prompt": "hi",
    "max_tokens": 3,
    "stop": ["x"],
    "min_tokens": 1,
    "stream_options": {"include_usage": True},
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 5,
        "remote_request_id": "r",
        "remote_num_tokens": 7,
    },
}


@total
@given(data=st.data())
def test_the_simulated_engine_takes_any_hand_off_or_refuses_it(data: st.DataObject) -> None:
    try:
        asked = read_request(mutated(HAND_OFF, data.draw), is_chat=False, model="m", context_tokens=999)
        assert 0 < asked.max_tokens < 1000
    except UserError as error:
        assert len(str(error)) < 500


FRONTEND = "\n".join(
    [
        'dynamo_frontend_requests_started_total{model="m",dynamo_namespace="ns"} 3.0',
        'dynamo_frontend_requests_total{model="unknown",error_type="overload",dynamo_namespace="ns"} 1.0',
        'dynamo_frontend_input_sequence_tokens_sum{model="m",dynamo_namespace="ns"} 300.0',
        'dynamo_frontend_input_sequence_tokens_count{model="m",dynamo_namespace="ns"} 3.0',
        'dynamo_frontend_input_sequence_tokens_bucket{model="m",dynamo_namespace="ns",le="50"} 1.0',
        'dynamo_frontend_input_sequence_tokens_bucket{model="m",dynamo_namespace="ns",le="200"} 3.0',
        'dynamo_frontend_input_sequence_tokens_bucket{model="m",dynamo_namespace="ns",le="+Inf"} 3.0',
        'dynamo_frontend_time_to_first_token_seconds_sum{model="m",dynamo_namespace="ns"} 0.3',
        'dynamo_frontend_time_to_first_token_seconds_count{model="m",dynamo_namespace="ns"} 3.0',
    ]
)


@total
@given(data=st.data())
def test_traffic_is_made_of_any_metrics_of_a_frontend_or_a_value_error(data: st.DataObject) -> None:
    exposition = Exposition("dynamo_frontend", "ns", "m")
    text = text_of(text_of(FRONTEND, data.draw), data.draw).encode("utf-8", "surrogatepass")
    try:
        counts = exposition.read(text)
    except ValueError:
        return
    traffic = traffic_of(60.0, increase({}, counts))
    for number in (traffic.isl_tokens, traffic.ttft_ms, traffic.requests):
        assert number is None or math.isfinite(number)


def test_an_error_event_is_what_the_fixtures_say() -> None:
    failure = find_failure((ENGINES / "vllm" / "error_kv_transfer.sse").read_bytes())
    assert failure
    assert isinstance(failure.to_api_error(), ApiError)
