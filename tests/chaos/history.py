"""The requests of a run: what each asked for, what its client saw, and the text that it must get."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from dynaplan.engines.sim.api import AnswerText, answer_offset, read_request

CONTEXT_TOKENS = 16384

answers = cache(AnswerText)
"""The texts of the simulated engine, by its seed: to make them takes longer than all else of a start."""


@dataclass
class Request:
    """One request and what its client saw; ``whole`` is the text that it must get."""

    number: int
    body: dict[str, Any]
    path: str
    sent_s: float
    whole: str
    ended_s: float = 0.0
    status: int = 0
    text: str = ""
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    finish_reason: str = ""
    tokens: int = -1
    ends: int = 0
    error: str = ""
    broken: str = ""
    """The failure of the connection to the frontend; empty without one."""

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_whole(self) -> bool:
        is_ended = self.ends == 1 if self.is_stream else True
        return self.status == 200 and is_ended and not (self.error or self.broken)

    def __str__(self) -> str:
        seen = f"{self.status} {self.error or self.broken or self.finish_reason} {len(self.text)} characters"
        asked = f"{'stream' if self.is_stream else 'whole'}, {self.body.get('max_tokens')} tokens"
        return f"request {self.number} ({asked}) from {self.sent_s:.3f} to {self.ended_s:.3f}: {seen}"

    def read_whole(self, document: dict[str, Any]) -> None:
        """Take an answer that is no stream."""
        if self.status != 200:
            self.error = str(document["error"]["message"])
            return
        [choice] = document["choices"]
        self.text = choice.get("text") or choice.get("message", {}).get("content", "")
        self.finish_reason = choice["finish_reason"]
        self.tokens = document["usage"]["completion_tokens"]

    def read_line(self, line: bytes) -> None:
        """Take a line of a stream."""
        if not line.startswith(b"data: "):
            return
        if line.strip() == b"data: [DONE]":
            self.ends += 1
            return
        document = json.loads(line[6:])
        if "error" in document:
            self.error = str(document["error"]["message"])
            return
        self.ids.add(document["id"])
        if usage := document.get("usage"):
            self.tokens = usage["completion_tokens"]
        for choice in document["choices"]:
            delta = choice.get("delta", {})
            self.roles += "role" in delta
            self.text += choice.get("text") or delta.get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def told(history: Sequence[Request]) -> str:
    """Count the requests that are not whole by what their clients were told, with when that was.

    The last column is in how many different seconds: clients that are refused ask again at once.
    """
    kinds: dict[str, list[Request]] = defaultdict(list)
    for request in history:
        if not request.is_whole:
            words = f"{request.status} {request.error or request.broken.partition('(')[0]}"
            kinds[re.sub(r"[0-9][0-9.]*", "N", words)[:100]].append(request)
    lines = [
        f"{len(each):6} {kind}: {each[0].ended_s:.1f} to {each[-1].ended_s:.1f}, "
        f"{len({int(request.ended_s) for request in each})} s"
        for kind, each in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]
    return "\n".join(lines)


def drawn(dice: Random, number: int, now_s: float, model: str, prompt: str, tokens: int) -> Request:
    """A request of a kind that the dice choose."""
    path = dice.choice(["/v1/chat/completions", "/v1/completions"])
    body: dict[str, Any] = {"model": model, "max_tokens": tokens}
    body |= {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    if dice.random() < 0.8:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if dice.random() < 0.2:
        body["stop"] = [" the ", "zzz"]
    return Request(number, body, path, now_s, expected(body, path))


def expected(body: dict[str, Any], path: str) -> str:
    """The simulated engine's whole answer: greedy, so one text for each prompt."""
    model = body["model"]
    asked = read_request(body, is_chat="chat" in path, model=model, context_tokens=CONTEXT_TOKENS)
    asked = answers(0).apply_stops(asked)
    pieces = answers(0).pieces(answer_offset(asked.question), 0, asked.max_tokens)
    text = json.loads(b'"%b"' % b"".join(pieces))
    return str(text[: asked.characters] if asked.characters is not None else text)
