"""Announcements of event channels: sockets that a process publishes events on, found through the store.

Key ``v1/event_channels/namespace/{ns}/component/{c}/endpoint/{e}/topic/{topic}/{id in hex}`` under the
publisher's lease, and the value, as Dynamo 1.6 writes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dynaplan.util.documents import object_field, parse_object, text_field, whole_field

CHANNELS_PREFIX = "v1/event_channels/"
ZMQ = "Zmq"


@dataclass(frozen=True)
class EventChannel:
    """Events on one topic from one publisher, an endpoint's process, and the sockets to hear them at.

    ``address`` is the ZMQ address of its PUB socket, ``replay`` that of the socket at which events can be
    asked for again; empty where they cannot. ``publisher`` is the id in its messages.
    """

    namespace: str
    component: str
    endpoint: str
    topic: str
    publisher: int
    address: str
    replay: str = ""

    @property
    def key(self) -> str:
        """The key of the announcement: of endpoint, topic and publisher, the last in hex."""
        scope = f"namespace/{self.namespace}/component/{self.component}/endpoint/{self.endpoint}"
        return f"{CHANNELS_PREFIX}{scope}/topic/{self.topic}/{self.publisher:x}"

    def to_json(self) -> str:
        """Write the announcement's value in Dynamo's layout, and the address of replays beside it."""
        name = {"namespace": self.namespace, "component": self.component, "name": self.endpoint}
        config = {"endpoint": self.address} | ({"replay": self.replay} if self.replay else {})
        return json.dumps(
            {
                "type": "EventChannel",
                "scope": {"kind": "endpoint", "endpoint": name},
                "topic": self.topic,
                "instance_id": self.publisher,
                "transport": {"kind": ZMQ, "config": config},
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> EventChannel:
        """Read an announcement's value; raises ValueError, and nothing else, when it is none over ZMQ."""
        document = parse_object(text)
        transport = object_field(document, "transport")
        kind = text_field(transport, "kind")
        if kind != ZMQ:
            raise ValueError(f"'kind' is {kind!r}: expected {ZMQ!r}")
        config = object_field(transport, "config")
        scope = object_field(document, "scope")
        name = object_field(scope, text_field(scope, "kind"))
        return cls(
            namespace=text_field(name, "namespace"),
            component=text_field(name, "component"),
            endpoint=text_field(name, "name", ""),
            topic=text_field(document, "topic"),
            publisher=whole_field(document, "instance_id"),
            address=text_field(config, "endpoint"),
            replay=text_field(config, "replay", ""),
        )


def channels_prefix(pattern: str) -> str:
    """Return the prefix of the keys of the channels whose subjects can match the pattern."""
    namespace, _, rest = pattern.partition(".")
    if not rest or namespace == "*":
        return CHANNELS_PREFIX
    component, _, event = rest.partition(".")
    prefix = f"{CHANNELS_PREFIX}namespace/{namespace}/component/"
    return f"{prefix}{component}/" if event and component != "*" else prefix
