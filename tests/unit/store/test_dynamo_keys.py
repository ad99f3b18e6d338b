from __future__ import annotations

import json

import pytest

from dynaplan.graph.lifecycle import Role
from dynaplan.store.dynamo_keys import dynamo_keys, not_callable
from dynaplan.store.instances import Instance

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
