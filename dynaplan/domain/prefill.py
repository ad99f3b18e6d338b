"""Remote prefill: what travels through the prefill queue and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def prefill_stream(namespace: str) -> str:
    """The JetStream stream of a namespace's prefill queue; its subject is ``{stream}.queue``."""
    return f"{namespace}_prefill_queue".replace("/", "_").replace("\\", "_")


@dataclass(frozen=True)
class RemotePrefillRequest:
    """One prefill to compute. The first six fields are the original's (Dynamo 0.3.2).

    ``path`` and ``body`` are the OpenAI request as the client sent it, for engines that take text;
    ``reply_to`` is the NATS subject the answer goes to.
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

    def to_json(self) -> bytes:
        """The queue's payload."""
        return json.dumps(self.__dict__, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> RemotePrefillRequest:
        """Read a payload; unknown fields are ignored, a missing request_id raises KeyError."""
        document = json.loads(payload)
        return cls(
            request_id=document["request_id"],
            engine_id=document.get("engine_id", ""),
            prompt_token_ids=tuple(document.get("prompt_token_ids", ())),
            sampling_params=document.get("sampling_params", {}),
            block_ids=tuple(document.get("block_ids", ())),
            computed_block_ids=tuple(document.get("computed_block_ids", ())),
            path=document.get("path", "/v1/completions"),
            body=document.get("body", {}),
            reply_to=document.get("reply_to", ""),
        )


@dataclass(frozen=True)
class PrefillAnswer:
    """The hand-off of a prefill, or the reason why there is none.

    ``hand_off`` is opaque: top-level fields of the decode request's body by which the engine that decodes
    takes the KV entries over. What it holds for that is let go when ``request_id`` is published to
    ``release_to``, unless that is empty. ``is_retryable`` says whether the decode worker may prefill for
    itself instead; ``status`` is the HTTP status of an error that is the client's fault, else 0.
    """

    request_id: str
    worker: str = ""
    hand_off: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    is_retryable: bool = True
    release_to: str = ""
    status: int = 0

    def to_json(self) -> bytes:
        """The answer's payload."""
        return json.dumps(self.__dict__, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> PrefillAnswer:
        """Read an answer's payload."""
        document = json.loads(payload)
        return cls(
            document["request_id"],
            document.get("worker", ""),
            document.get("hand_off", {}),
            document.get("error", ""),
            document.get("is_retryable", True),
            document.get("release_to", ""),
            document.get("status", 0),
        )
