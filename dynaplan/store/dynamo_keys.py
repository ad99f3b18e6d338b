"""The keys by which today's Dynamo finds instances and model cards: buckets ``v1/instances`` and ``v1/mdc``.

A worker writes them beside its registrations under ``/services/``, under the same lease. Field names,
and what may be left out, are those of Dynamo 1.6.1, whose own reader checks them in ``tests/interop``.

Dynamo's reader knows the transports ``tcp`` and ``nats_tcp`` and drops an instance with any other. dynaplan
is called over HTTP (docs/decisions/0038), so the ``tcp`` that it writes is its URL: Dynamo's planner
counts the instance, and its client refuses to call such an address before it sends anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from dynaplan.graph.lifecycle import Role
from dynaplan.store.instances import Instance
from dynaplan.util.documents import object_field, parse_object

INSTANCES_BUCKET = "v1/instances"
CARDS_BUCKET = "v1/mdc"

COMPONENTS: Mapping[Role | None, str] = {Role.DECODE: "backend", Role.PREFILL: "prefill"}
"""The components that Dynamo's planner counts, by the role of the workers that it expects there."""

_SHOWN_CHARACTERS = 100
_NOT_IN_A_SLUG = re.compile(r"[^a-z0-9_-]+")


def dynamo_keys(instance: Instance, role: Role | None = None) -> dict[str, str]:
    """Return the instance's keys and values in Dynamo's layout: under its own component and under the role's.

    With a model card, under the role's component, when the instance's card names a model.
    """
    counted = COMPONENTS.get(role, instance.component)
    keys = {
        _key(INSTANCES_BUCKET, instance, component): _document(
            "Endpoint", instance, component, {"transport": {"tcp": instance.url}}
        )
        for component in (instance.component, counted)
    }
    if "model" in instance.card:
        card = {"card_json": _model_card(instance.card, role)}
        keys[_key(CARDS_BUCKET, instance, counted)] = _document("Model", instance, counted, card)
    return keys


def not_callable(text: str) -> str:
    """Return how an instance is reached that dynaplan cannot call, as in ``tcp 10.0.0.7:4000``; else empty.

    Raises ValueError, and nothing else, for what is no instance.
    """
    transport = object_field(parse_object(text), "transport")
    addresses = [address for address in transport.values() if isinstance(address, str)]
    if any(address.startswith(("http://", "https://")) for address in addresses):
        return ""
    reached = ", ".join(f"{name} {address}" for name, address in transport.items()) or "nothing"
    return reached[:_SHOWN_CHARACTERS]


def _key(bucket: str, instance: Instance, component: str) -> str:
    return f"{bucket}/{instance.namespace}/{component}/{instance.endpoint}/{instance.instance_id:x}"


def _document(kind: str, instance: Instance, component: str, more: Mapping[str, object]) -> str:
    document = {
        "type": kind,
        "namespace": instance.namespace,
        "component": component,
        "endpoint": instance.endpoint,
        "instance_id": instance.instance_id,
        **more,
    }
    return json.dumps(document, separators=(",", ":"))


def _model_card(card: Mapping[str, object], role: Role | None) -> dict[str, object]:
    model = str(card["model"])
    is_prefill = role is Role.PREFILL
    return {
        "display_name": model,
        "slug": _NOT_IN_A_SLUG.sub("_", model.lower()),
        "source_path": card.get("tokenizer") or model,
        "context_length": card.get("context_tokens", 0),
        "kv_cache_block_size": card.get("kv_block_tokens", 0),
        "migration_limit": 0,
        "model_type": "Prefill" if is_prefill else "Chat | Completions",
        "model_input": "Text",
        "worker_type": "prefill" if is_prefill else "aggregated",
    }
