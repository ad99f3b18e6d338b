"""Who serves what, where: the registration a worker puts into the key-value store under its lease."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SERVICES_PREFIX = "/services/"

PUBLIC_URL = "public_url"
"""The key of a frontend's card that holds the base address of its public server; ``/metrics`` is there."""


@dataclass(frozen=True)
class Instance:
    """One endpoint of one worker.

    Key ``/services/{namespace}/{component}/{endpoint}/{instance_id as hex}``; the instance id is the
    id of the lease that the key lives under. ``url`` is the base address of the worker's HTTP server
    (``http://127.0.0.1:PORT``); the endpoint is served at ``{url}/{endpoint}``. ``engine_url`` is the base
    address of the engine's OpenAI API, when that is a server of its own. ``card`` carries what a service
    adds about itself (the model's name, its context length ...).
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

    @property
    def openai_url(self) -> str:
        """Where requests for tokens go."""
        return self.engine_url or self.url

    @property
    def key(self) -> str:
        """The registration's key."""
        return f"{SERVICES_PREFIX}{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id:x}"

    def to_json(self) -> str:
        """The registration's value."""
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
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """Read a registration's value; raises ValueError or KeyError when it is not one."""
        document = json.loads(text)
        return cls(
            namespace=document["namespace"],
            component=document["component"],
            endpoint=document["endpoint"],
            instance_id=int(document["instance_id"]),
            url=document["transport"].get("http", ""),
            worker=document.get("worker", ""),
            pid=int(document.get("pid", 0)),
            card=document.get("card", {}),
            engine_url=document["transport"].get("openai", ""),
        )


def public_urls(instances: Iterable[Instance]) -> tuple[str, ...]:
    """The public addresses of the frontends among these, each once: several processes may share one."""
    urls = (instance.card.get(PUBLIC_URL) for instance in instances)
    return tuple(dict.fromkeys(url for url in urls if isinstance(url, str)))
