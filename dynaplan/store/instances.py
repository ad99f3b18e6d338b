"""What workers write of themselves into the key-value store, under their leases.

**Registrations**, ``/services/{namespace}/{component}/{endpoint}/{instance id as hex}``: one endpoint of one
worker, with the worker's card.

**Instance keys**, ``v1/{namespace}/{name}/{instance id as hex}``: a mark of one instance, such as asleep,
with any value.

**Dynamo's layout**, buckets ``v1/instances`` and ``v1/mdc``: the keys by which today's Dynamo finds
instances and model cards, written in the same transaction as the registrations. Field names, and what may be
left out, are those of Dynamo 1.6.1, whose own reader checks them in ``tests/interop``. That reader knows the
transports ``tcp`` and ``nats_tcp`` and drops an instance with any other. dynaplan is called over HTTP
(docs/decisions/0038), so the ``tcp`` that it writes is its URL: Dynamo's planner counts the instance, and
its client refuses to call such an address before it sends anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from dynaplan.graph.lifecycle import Role
from dynaplan.process.identity import LeaseOwner
from dynaplan.util.documents import (
    MAX_WHOLE,
    flag_field,
    object_field,
    parse_object,
    text_field,
    whole_field,
    whole_list_field,
)

SERVICES_PREFIX = "/services/"

PUBLIC_URL = "public_url"
"""The key of a frontend's card that holds the base address of its public server; ``/metrics`` is there."""


PREFILL_WORKER_QUEUE = "prefill_lane"
"""The key of a prefill worker's card that names its lane of the prefill queue."""

CARD_FIELDS: Mapping[str, Callable[[Mapping[str, Any], str], object]] = {
    "model": text_field,
    "tokenizer": text_field,
    "chat_template": text_field,
    "context_tokens": whole_field,
    "kv_block_tokens": whole_field,
    "reserves": flag_field,
    "requires_remote_prefill": flag_field,
    "keep_alive": flag_field,
    "routes_to": text_field,
    "gpus": whole_list_field,
    "kv_network": flag_field,
    "kv_events": object_field,
    "follows_kv_events": flag_field,
    PREFILL_WORKER_QUEUE: text_field,
    PUBLIC_URL: text_field,
}
"""The fields of a card that dynaplan reads, each with the reader of its type."""


@dataclass(frozen=True)
class Instance:
    """One endpoint of one worker.

    Key ``/services/{namespace}/{component}/{endpoint}/{instance_id as hex}``; the instance id is the id of
    the lease that the key lives under. ``url`` is the base address of the worker's HTTP server
    (``http://127.0.0.1:PORT``); the endpoint is served at ``{url}/{endpoint}``. ``engine_url`` is the base
    address of the engine's OpenAI API, when that is a server of its own. ``card`` carries what a service
    adds about itself (the model's name, its context length ...). ``host`` is the name of the worker's host,
    and ``network`` the same for all processes that share its loopback addresses; both are empty where a
    worker does not state it. ``is_managed``: a ``serve`` starts, restarts and ends the worker; False for one
    that was started alone. ``owner`` is the process with which the registration should end.
    """

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    url: str
    worker: str = ""
    pid: int = 0
    card: Mapping[str, Any] = field(default_factory=dict)
    engine_url: str = ""
    host: str = ""
    network: str = ""
    is_managed: bool = True
    owner: LeaseOwner | None = None

    def is_reachable_from(self, network: str) -> bool:
        """Tell whether a process of that network can call the worker: loopback leads to its own host only."""
        is_elsewhere = bool(network and self.network) and network != self.network
        return not (is_elsewhere and is_loopback(host_of(self.url)))

    def can_hand_over_to(self, other: Instance) -> bool:
        """Tell whether KV entries can move from this worker to the other: on one host, or over a network."""
        is_on_one_host = not (self.network and other.network) or self.network == other.network
        return is_on_one_host or bool(self.card.get("kv_network") and other.card.get("kv_network"))

    @property
    def openai_url(self) -> str:
        """The base address for requests for tokens."""
        return self.engine_url or self.url

    @property
    def key(self) -> str:
        """The key of the registration: of namespace, component, endpoint and instance, the last in hex."""
        return f"{SERVICES_PREFIX}{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id:x}"

    def to_json(self) -> str:
        """Return the registration's value, as ``from_json`` and Dynamo's clients read it."""
        return json.dumps(
            {
                "namespace": self.namespace,
                "component": self.component,
                "endpoint": self.endpoint,
                "instance_id": self.instance_id,
                "transport": {"http": self.url} | ({"openai": self.engine_url} if self.engine_url else {}),
                "worker": self.worker,
                "pid": self.pid,
                "card": dict(self.card),
                **({"host": self.host} if self.host else {}),
                **({"network": self.network} if self.network else {}),
                **({} if self.is_managed else {"managed": False}),
                **({"owner": self.owner.to_record()} if self.owner else {}),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """Read a registration's value; raises ValueError, and nothing else, when it is not one."""
        document = parse_object(text)
        transport = object_field(document, "transport")
        return cls(
            namespace=text_field(document, "namespace"),
            component=text_field(document, "component"),
            endpoint=text_field(document, "endpoint"),
            instance_id=whole_field(document, "instance_id"),
            url=text_field(transport, "http", ""),
            worker=text_field(document, "worker", ""),
            pid=whole_field(document, "pid", 0),
            card=_checked_card(object_field(document, "card", {})),
            engine_url=text_field(transport, "openai", ""),
            host=text_field(document, "host", ""),
            network=text_field(document, "network", ""),
            is_managed=flag_field(document, "managed", True),
            owner=LeaseOwner.from_record(owner) if (owner := object_field(document, "owner", {})) else None,
        )


def _checked_card(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The card, once the fields that dynaplan itself reads have their types; others may be anything."""
    for name in CARD_FIELDS.keys() & card.keys():
        CARD_FIELDS[name](card, name)
    return card


def host_of(url: str) -> str:
    """The host name or address in a URL; empty when there is none."""
    place = url.partition("://")[2].partition("/")[0]
    return place.partition("]")[0] + "]" if place.startswith("[") else place.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Tell whether that host name or address leads to the asking host itself."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def public_urls(instances: Iterable[Instance]) -> tuple[str, ...]:
    """The public addresses of the frontends among these, each once: several processes may share one."""
    urls = (instance.card.get(PUBLIC_URL) for instance in instances)
    return tuple(dict.fromkeys(url for url in urls if isinstance(url, str)))


_MAX_DIGITS = 16
_HEXADECIMAL = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class InstanceKeys:
    """The keys ``v1/NAMESPACE/NAME/INSTANCE`` that mark instances: those of the name ``asleep`` sleep."""

    name: str

    def prefix(self, namespace: str) -> str:
        """Return the prefix of these keys in a namespace."""
        return f"v1/{namespace}/{self.name}/"

    def key(self, namespace: str, instance_id: int) -> str:
        """Return the key of one instance."""
        return f"{self.prefix(namespace)}{instance_id:x}"

    def instance(self, namespace: str, key: str) -> int:
        """Return the instance id that a key ends in; 0 for any other end."""
        digits = key.removeprefix(self.prefix(namespace))
        if not 0 < len(digits) <= _MAX_DIGITS or set(digits) - _HEXADECIMAL:
            return 0
        number = int(digits, 16)
        return number if number <= MAX_WHOLE else 0

    def instances(self, namespace: str, keys: Iterable[str]) -> frozenset[int]:
        """Return the instance ids of these keys; a key that ends in none is left out."""
        return frozenset(found for key in keys if (found := self.instance(namespace, key)))


ASLEEP = InstanceKeys("asleep")
"""The instance's engine sleeps. The value is why it cannot be woken, or empty."""

SLEEP = InstanceKeys("sleep")
"""The instance's engine is to sleep: frontends send it nothing more, and its worker puts it to sleep when it
has answered all. The value is the level, or ``SLEEP_FAILED`` and why it cannot."""

SLEEP_FAILED = "failed: "

WAKE = InstanceKeys("wake")
"""Somebody wants the instance's engine to be awake; its worker takes the key away when it tries."""


INSTANCES_BUCKET = "v1/instances"
CARDS_BUCKET = "v1/mdc"

COMPONENTS: Mapping[Role | None, str] = {Role.DECODE: "backend", Role.PREFILL: "prefill"}
"""The components that Dynamo's planner counts, by the role of the workers that it expects there."""

_MAX_SHOWN = 100
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
    return reached[:_MAX_SHOWN]


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
