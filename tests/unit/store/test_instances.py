"""What is said of instances is read from keys that anybody may have written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.graph.lifecycle import Role
from dynaplan.process.identity import LeaseOwner, ProcessIdentity
from dynaplan.store.instances import (
    ASLEEP,
    PUBLIC_URL,
    Instance,
    dynamo_keys,
    host_of,
    is_loopback,
    not_callable,
    public_urls,
)
from dynaplan.util.documents import MAX_WHOLE

WORKER = Instance(
    "ns", "VllmWorker", "generate", 31, "http://127.0.0.1:1", "ns_VllmWorker", 7, {"model": "m"}
)


def test_a_registration_is_read_as_it_was_written() -> None:
    assert Instance.from_json(WORKER.to_json()) == WORKER


def test_the_key_has_the_lease_in_hexadecimal() -> None:
    assert WORKER.key == "/services/ns/VllmWorker/generate/1f"


@pytest.mark.parametrize("engine_url", ["", "http://127.0.0.1:2"])
def test_requests_for_tokens_go_to_the_engine_where_it_has_a_server_of_its_own(engine_url: str) -> None:
    worker = Instance("ns", "VllmWorker", "generate", 1, "http://127.0.0.1:1", engine_url=engine_url)
    assert worker.openai_url == (engine_url or "http://127.0.0.1:1")
    assert Instance.from_json(worker.to_json()) == worker


@pytest.mark.parametrize("text", ['{"owner": 1', '{"owner": {"pid": 1}', '{"owner": {"pid": "x"}'])
def test_an_owner_that_is_none_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Instance.from_json(text + WORKER.to_json().replace("{", ", ", 1))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"transport": 1}', '{"namespace": "ns"}'])
def test_anything_but_a_registration_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Instance.from_json(text)


def test_a_public_address_that_several_frontends_share_counts_once_and_nonsense_not_at_all() -> None:
    cards = (
        {PUBLIC_URL: "http://a"},
        {PUBLIC_URL: "http://b"},
        {PUBLIC_URL: "http://a"},
        {PUBLIC_URL: 7},
        {},
    )
    workers = [Instance("ns", "Frontend", "http", number, "", card=card) for number, card in enumerate(cards)]
    assert public_urls(workers) == ("http://a", "http://b")


def test_an_unmanaged_worker_and_its_host_are_told() -> None:
    owner = LeaseOwner(ProcessIdentity(7, 4711, "boot"), 4026531836)
    worker = replace(
        WORKER, host="gpu1", network="boot/4", is_managed=False, card={"gpus": [0, 3]}, owner=owner
    )
    assert Instance.from_json(worker.to_json()) == worker
    assert Instance.from_json(WORKER.to_json()).is_managed


@pytest.mark.parametrize(
    ("url", "network", "is_reachable_from"),
    [
        ("http://127.0.0.1:1", "boot/4", True),
        ("http://127.0.0.1:1", "boot/5", False),
        ("http://[::1]:1", "boot/5", False),
        ("http://localhost:1", "boot/5", False),
        ("http://10.0.0.2:1", "boot/5", True),
        ("http://gpu2:1", "boot/5", True),
        ("http://127.0.0.1:1", "", True),
        ("", "boot/5", True),
    ],
)
def test_loopback_leads_to_the_own_host_only(url: str, network: str, is_reachable_from: bool) -> None:
    worker = replace(WORKER, url=url, network="boot/4")
    assert worker.is_reachable_from(network) is is_reachable_from
    assert replace(worker, network="").is_reachable_from(network)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://gpu2:1/path", "gpu2"),
        ("https://[fd00::1]:1", "[fd00::1]"),
        ("http://[fd00::1", "[fd00::1]"),
        ("nonsense", ""),
    ],
)
def test_the_host_of_a_url_is_read_from_anything(url: str, host: str) -> None:
    assert host_of(url) == host
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("prefill", "decode", "can"),
    [
        ({"network": "a"}, {"network": "a"}, True),
        ({"network": "a"}, {"network": "b"}, False),
        ({}, {"network": "b"}, True),
        ({"network": "a", "card": {"kv_network": True}}, {"network": "b"}, False),
        (
            {"network": "a", "card": {"kv_network": True}},
            {"network": "b", "card": {"kv_network": True}},
            True,
        ),
    ],
)
def test_kv_entries_move_on_one_host_or_over_a_network_that_both_have_opened(
    prefill: dict[str, Any], decode: dict[str, Any], can: bool
) -> None:
    assert replace(WORKER, **prefill).can_hand_over_to(replace(WORKER, **decode)) is can


@given(st.sets(st.integers(1, MAX_WHOLE), max_size=5))
def test_what_is_written_is_read(instances: set[int]) -> None:
    keys = [ASLEEP.key("ns", instance_id) for instance_id in instances]
    assert ASLEEP.instances("ns", keys) == instances


@given(st.text(max_size=20))
def test_a_key_that_ends_in_no_instance_id_is_left_out(end: str) -> None:
    for instance_id in ASLEEP.instances("ns", [ASLEEP.prefix("ns") + end]):
        assert 0 < instance_id <= MAX_WHOLE


def test_signs_words_and_numbers_beyond_a_lease_are_no_instance_ids() -> None:
    ends = ("", "-5", "+5", "0x5", "A", "5_5", "\u0663", "f" * 16, "f" * 5000, "word", "0", " 7")
    assert ASLEEP.instances("ns", [ASLEEP.prefix("ns") + end for end in ends]) == frozenset()


CARD = {"model": "meta-llama/Llama-3.1-8B", "context_tokens": 4096, "kv_block_tokens": 16}


def instance(component: str = "VllmWorker", **more: object) -> Instance:
    return Instance("ns", component, "generate", 0xA1, "http://127.0.0.1:4000", **more)  # type: ignore[arg-type]


def test_an_instance_is_there_under_its_own_component_and_under_the_one_of_its_role() -> None:
    assert {key: json.loads(value) for key, value in dynamo_keys(instance(), Role.DECODE).items()} == {
        f"v1/instances/ns/{component}/generate/a1": {
            "type": "Endpoint",
            "namespace": "ns",
            "component": component,
            "endpoint": "generate",
            "instance_id": 0xA1,
            "transport": {"tcp": "http://127.0.0.1:4000"},
        }
        for component in ("VllmWorker", "backend")
    }


@pytest.mark.parametrize(
    ("component", "role", "components"),
    [
        ("PrefillWorker", Role.PREFILL, ["PrefillWorker", "prefill"]),
        ("prefill", Role.PREFILL, ["prefill"]),
        ("Frontend", Role.FRONTEND, ["Frontend"]),
        ("mine", None, ["mine"]),
    ],
)
def test_only_the_roles_that_are_counted_have_a_component_of_their_own(
    component: str, role: Role | None, components: list[str]
) -> None:
    keys = [f"v1/instances/ns/{each}/generate/a1" for each in components]
    assert list(dynamo_keys(instance(component), role)) == keys


@pytest.mark.parametrize(
    ("role", "component", "model_type", "worker_type"),
    [
        (Role.DECODE, "backend", "Chat | Completions", "aggregated"),
        (Role.PREFILL, "prefill", "Prefill", "prefill"),
    ],
)
def test_the_card_of_a_model_has_what_dynamos_reader_asks_for(
    role: Role, component: str, model_type: str, worker_type: str
) -> None:
    keys = dynamo_keys(instance(card=CARD), role)
    (card,) = (json.loads(value) for key, value in keys.items() if key.startswith("v1/mdc/"))
    assert f"v1/mdc/ns/{component}/generate/a1" in keys
    assert (card["type"], card["component"], card["instance_id"]) == ("Model", component, 0xA1)
    assert card["card_json"] == {
        "display_name": "meta-llama/Llama-3.1-8B",
        "slug": "meta-llama_llama-3_1-8b",
        "source_path": "meta-llama/Llama-3.1-8B",
        "context_length": 4096,
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": model_type,
        "model_input": "Text",
        "worker_type": worker_type,
    }


@pytest.mark.parametrize(
    ("transport", "reached"),
    [
        ({"tcp": "10.0.0.7:4000/a1/ns/backend/generate"}, "tcp 10.0.0.7:4000/a1/ns/backend/generate"),
        ({"nats_tcp": "subject"}, "nats_tcp subject"),
        ({"a": 1, "b": "x"}, "a 1, b x"),
        ({}, "nothing"),
        ({"tcp": "http://127.0.0.1:4000"}, ""),
        ({"http": "https://box:4000"}, ""),
    ],
)
def test_what_is_not_reached_over_http_cannot_be_called(transport: dict[str, object], reached: str) -> None:
    assert not_callable(json.dumps({"transport": transport})) == reached


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"transport": "tcp"}'])
def test_what_is_no_instance_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        not_callable(text)
