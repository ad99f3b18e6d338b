"""No bytes that somebody writes into the store, the queue or an answer break a reader.

Each reader is given arbitrary JSON and mutations of a real value, 100 times (10,000 with
``DYNAPLAN_TORTURE``); it returns a value of its type or raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynaplan.contract.counts import FleetCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts, planner_prefix
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import PrefillAnswer, RemotePrefillRequest
from dynaplan.fleet.unreadable import unreadable
from dynaplan.routing.disaggregation import DisaggregationSettings, with_live_settings
from dynaplan.store.instances import PUBLIC_URL, Instance
from dynaplan.store.model import KeyValue
from dynaplan.util.documents import parse_object, whole_number
from tests.attack.fuzzing import MAX_EXAMPLES

CARD = {
    "model": "m",
    "tokenizer": "sim",
    "context_tokens": 16384,
    "kv_block_tokens": 64,
    PUBLIC_URL: "http://x",
}
REGISTRATION = Instance("ns", "VllmWorker", "generate", 7587, "http://127.0.0.1:1", "w", 12, CARD).to_json()
FLEET: dict[str, Any] = {
    "roles": {"decode": {"ready": 1, "starting": 1}, "prefill": {"backoff": 2}},
    "gpus_per_worker": {"decode": 1, "prefill": 0.5},
    "gpus_total": 8,
    "startup_s": {"decode": 2.5},
}
READERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "registration": (Instance.from_json, REGISTRATION),
    "fleet": (lambda text: FleetCounts.from_json(parse_object(text)), json.dumps(FLEET)),
    "holds": (
        lambda text: RoleHolds.from_json(parse_object(text)),
        RoleHolds(
            decode=Hold(3, 3, 1795348800.0, 1795356000.0, "2026-11-22 14:00", "alice", 1000, 47, "h")
        ).to_text(),
    ),
    "load": (
        lambda text: WorkerLoad.from_json(parse_object(text)),
        json.dumps(WorkerLoad(1, 8, 2, 3, 4, 0.5, 0.1).to_json()),
    ),
    "prefill request": (
        lambda text: RemotePrefillRequest.from_json(text.encode("utf-8", "surrogatepass")),
        RemotePrefillRequest("r", body={"prompt": "hi"}, reply_to="a.b").to_json().decode(),
    ),
    "prefill answer": (
        lambda text: PrefillAnswer.from_json(text.encode("utf-8", "surrogatepass")),
        PrefillAnswer("r", "w", {"kv": 1}, release_to="a.b").to_json().decode(),
    ),
}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def mutated(document: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """The document with one value, at any depth, replaced by anything."""
    if isinstance(document, dict) and document and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(document)))
        return {**document, name: mutated(document[name], draw)}
    return draw(anything)


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=MAX_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_reader_returns_a_value_or_raises_value_error(kind: str, data: st.DataObject) -> None:
    read, real = READERS[kind]
    read(real)
    document = mutated(json.loads(real), data.draw)
    text = data.draw(st.sampled_from([json.dumps(document), json.dumps(document)[:-1], str(document)]))
    try:
        read(text)
    except ValueError as error:
        assert len(str(error)) < 300


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("text", ["", "null", "[" * 200_000, '{"a":' * 5000, "NaN", '"\ud800"', "\x00"])
def test_what_is_no_object_is_refused_by_every_reader(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        READERS[kind][0](text)


@pytest.mark.parametrize(
    "change",
    [
        {"instance_id": float("inf")},
        {"instance_id": "12"},
        {"component": ["x"]},
        {"card": []},
        {"card": {"kv_block_tokens": "many"}},
        {"transport": {"http": 7}},
        {"pid": -1},
    ],
    ids=str,
)
def test_a_registration_with_a_wrong_field_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|Infinity"):
        Instance.from_json(json.dumps(json.loads(REGISTRATION) | change))


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(
    st.text(max_size=30)
    | st.sampled_from(["--5", "²", "٣", "9" * 5000, "-", "1e3", " 7 ", "7\x1f", "+1", "0x1"])
)
def test_a_count_is_a_whole_number_or_not_set(text: str) -> None:
    keys = {planner_prefix("ns") + "num_decode_workers": text}
    assert DesiredCounts.from_keys("ns", keys).num_decode_workers == (
        -1 if whole_number(text) is None else int(text.strip())
    )


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(st.text(max_size=30) | st.sampled_from(["--5", "²", "9" * 5000, "-3", " 7 ", "0"]))
def test_a_live_threshold_that_is_no_number_changes_nothing(text: str) -> None:
    keys = {"/ns/disagg_router/max_prefill_queue_size": text}
    number = whole_number(text)
    found = with_live_settings(DisaggregationSettings(), "ns", keys).max_prefill_queue_size
    assert found == (
        DisaggregationSettings().max_prefill_queue_size if number is None or number < 0 else number
    )


def test_every_unreadable_key_is_named_with_its_fault() -> None:
    items = [
        KeyValue("v1/ns/planner/num_decode_workers", "--5"),
        KeyValue("v1/ns/planner/decision_id", "3"),
        KeyValue("/ns/disagg_router/max_prefill_queue_size", "-1"),
        KeyValue("/ns/disagg_router/max_local_prefill_length", "1000"),
        KeyValue("v1/ns/planner_extensions/holds", '{"decode": {"at_least": "all"}}'),
        KeyValue("v1/ns/fleet", "[]"),
        KeyValue("/services/ns/VllmWorker/generate/1", REGISTRATION),
        KeyValue("/services/ns/VllmWorker/generate/2", "{}"),
    ]
    assert unreadable("ns", items) == {
        "v1/ns/planner/num_decode_workers": "'--5': expected a whole number",
        "/ns/disagg_router/max_prefill_queue_size": "'-1': expected a whole number from 0 on",
        "v1/ns/planner_extensions/holds": "'at_least' is 'all': expected a whole number, at least 0",
        "v1/ns/fleet": "it is []: expected a JSON object",
        "/services/ns/VllmWorker/generate/2": "'transport' is None: expected a JSON object",
    }


@pytest.mark.parametrize("subject", ["a b", "a..b", "", ".", "a.*", ">", "a\r\nPUB x", "é\x00"])
def test_a_prefill_whose_answer_could_not_be_sent_is_refused(subject: str) -> None:
    request = json.dumps({"request_id": "r", "reply_to": subject})
    if not subject:
        assert RemotePrefillRequest.from_json(request.encode()).reply_to == ""
        return
    with pytest.raises(ValueError, match="NATS subject"):
        RemotePrefillRequest.from_json(request.encode())
