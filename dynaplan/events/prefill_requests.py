"""Remote prefill: the request in the prefill queue, and the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.http.trace import passed_headers
from dynaplan.util.documents import (
    flag_field,
    number_field,
    object_field,
    parse_object,
    shown,
    text_field,
    whole_field,
    whole_list_field,
)


def prefill_stream(namespace: str, component: str = "") -> str:
    """Return the JetStream stream of a prefill queue; its subject is ``{stream}.queue``.

    A namespace has one, under the name that Dynamo gives it. Where it has several models, each has a queue of
    its own, named after the ``component`` of its prefill workers.
    """
    queue = f"{namespace}_prefill_queue" + (f"_{component}" if component else "")
    return queue.replace("/", "_").replace("\\", "_")


def is_subject(text: str) -> bool:
    """Tell whether NATS takes the text as a subject to publish to: words joined by dots, no wildcards."""
    is_plain = text.isprintable() and not set(text) & set(" *>")
    return is_plain and all(text.split("."))


@dataclass(frozen=True)
class RemotePrefillRequest:
    """One prefill to compute. The first six fields are those of Dynamo 0.3.2.

    ``path`` and ``body`` are the OpenAI request as the client sent it, for engines that take text;
    ``reply_to`` is the NATS subject the answer goes to. Times are seconds since 1970, 0 where the queue is
    not dispatched by deadline: the request came at ``arrived_unix_s``, until ``deadline_unix_s`` its prompt
    is to be computed, from ``owed_unix_s`` on it is owed (``events/dispatch_order.py``), and after
    ``waits_until_unix_s`` nobody waits for it. ``trace`` are the headers of the client's trace and
    ``X-Request-Id``, which the engine gets.
    """

    request_id: str
    engine_id: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    block_ids: tuple[int, ...] = ()
    computed_block_ids: tuple[int, ...] = ()
    path: str = "/v1/completions"
    body: Mapping[str, Any] = field(default_factory=dict)
    reply_to: str = ""
    arrived_unix_s: float = 0.0
    deadline_unix_s: float = 0.0
    owed_unix_s: float = 0.0
    waits_until_unix_s: float = 0.0
    trace: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the message for the queue: one JSON object with every field."""
        return json.dumps(self.__dict__, separators=(",", ":")).encode()

    def to_json_around(self, body: bytes) -> bytes:
        """Return the queue's payload with this JSON text as its ``body``, as it stands."""
        others = {name: value for name, value in self.__dict__.items() if name != "body"}
        return json.dumps(others, separators=(",", ":")).encode()[:-1] + b',"body":' + body + b"}"

    @classmethod
    def from_json(cls, payload: bytes) -> RemotePrefillRequest:
        """Read a payload; unknown fields are ignored. Raises ValueError, and nothing else."""
        document = parse_object(payload)
        reply_to = text_field(document, "reply_to", "")
        if reply_to and not is_subject(reply_to):
            raise ValueError(f"'reply_to' is {shown(reply_to)}: expected a NATS subject without wildcards")
        return cls(
            request_id=text_field(document, "request_id"),
            engine_id=text_field(document, "engine_id", ""),
            prompt_token_ids=whole_list_field(document, "prompt_token_ids"),
            sampling_params=object_field(document, "sampling_params", {}),
            block_ids=whole_list_field(document, "block_ids"),
            computed_block_ids=whole_list_field(document, "computed_block_ids"),
            path=text_field(document, "path", "/v1/completions"),
            body=object_field(document, "body", {}),
            reply_to=reply_to,
            arrived_unix_s=number_field(document, "arrived_unix_s", 0.0),
            deadline_unix_s=number_field(document, "deadline_unix_s", 0.0),
            owed_unix_s=number_field(document, "owed_unix_s", 0.0),
            waits_until_unix_s=number_field(document, "waits_until_unix_s", 0.0),
            trace=passed_headers(object_field(document, "trace", {})),
        )


@dataclass(frozen=True)
class PrefillAnswer:
    """The hand-off of a prefill, or the reason why there is none.

    ``hand_off`` is opaque: top-level fields of the decode request's body by which the decoding engine takes
    the KV entries over. The prefilling engine holds these until ``request_id`` is published to
    ``release_to``, unless that is empty. With ``is_retryable`` the decode worker may prefill itself instead.
    ``status`` is the HTTP status of an error that is the client's fault, else 0. ``cached_tokens`` of the
    prompt came out of the prefilling engine's cache; None where it does not report that.
    """

    request_id: str
    worker: str = ""
    hand_off: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    is_retryable: bool = True
    release_to: str = ""
    status: int = 0
    cached_tokens: int | None = None

    def to_json(self) -> bytes:
        """Return the message to the subject ``reply_to`` of the request: one JSON object with every field."""
        return json.dumps(self.__dict__, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> PrefillAnswer:
        """Read an answer's payload. Raises ValueError, and nothing else."""
        document = parse_object(payload)
        release_to = text_field(document, "release_to", "")
        if release_to and not is_subject(release_to):
            raise ValueError(f"'release_to' is {shown(release_to)}: expected a NATS subject")
        status = whole_field(document, "status", 0)
        if status and not 400 <= status <= 599:
            raise ValueError(f"'status' is {status}: expected 0 or an HTTP status of an error")
        cached = document.get("cached_tokens")
        return cls(
            text_field(document, "request_id"),
            text_field(document, "worker", ""),
            object_field(document, "hand_off", {}),
            text_field(document, "error", ""),
            flag_field(document, "is_retryable", True),
            release_to,
            status,
            None if cached is None else whole_field(document, "cached_tokens"),
        )
