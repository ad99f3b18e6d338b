"""A client of ``/v1/completions``: one HTTP client, one service, one model; answers are read cheaply.

Of most events of a stream only the time is kept, and whether they bring tokens; the last ones are parsed,
which hold the number of tokens, or the error, with which the stream ends.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaplan.http.client import JSON_BODY, HttpClient, NotConnected
from dynaplan.http.tls import ClientTls
from dynaplan.util.errors import DeploymentError, PermanentError

LAST_EVENTS = 3
"""The events at a stream's end that are parsed: the last token, an empty piece with the reason, the usage."""

EMPTY_TEXTS = (b'"text":""', b'"text": ""')
UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')


class RequestFailed(PermanentError):
    """A request without a whole answer; ``kind`` names the failure, such as ``503 no_worker``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"a request failed: {kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Answer:
    """A completed answer. Times are seconds of ``time.perf_counter``, one for each event with tokens.

    The numbers of tokens are as the engine reports them: it may put several into one event.
    ``prompt_tokens`` is 0 where it does not; ``cached_tokens`` are the prompt's prefix hits.
    """

    sent_s: float
    event_times_s: Sequence[float]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.event_times_s[0]

    @property
    def last_s(self) -> float:
        return self.event_times_s[-1]

    @property
    def ttft_ms(self) -> float:
        """The time from sending the request to its first token."""
        return (self.first_s - self.sent_s) * 1000.0

    @property
    def itl_s(self) -> float | None:
        """The mean time between two tokens; None for an answer of one."""
        if self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def tokens_per_event(self) -> float:
        return self.output_tokens / len(self.event_times_s)


class AnswerStream:
    """A stream of server-sent events as it arrives."""

    def __init__(self) -> None:
        self.sent_s = 0.0
        self.event_times_s = array("d")
        self._rest = b""
        self._last: deque[bytes] = deque(maxlen=LAST_EVENTS)
        self._is_done = False

    @property
    def tokens(self) -> int:
        """The number of events with tokens so far; each may bring several."""
        return len(self.event_times_s)

    def take(self, data: bytes, now_s: float) -> None:
        """Add the data that arrived at that time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._last.append(line)
                if _has_token(line):
                    self.event_times_s.append(now_s)
            elif line.startswith(b"data: [DONE]"):
                self._is_done = True

    def answer(self) -> Answer:
        """Return the whole answer; raises RequestFailed when it is cut short, or is an error."""
        last = [_event(line) for line in self._last]
        for event in last:
            if error := event.get("error"):
                raise RequestFailed(f"broke off: {_kind(error)}", _message(error))
        if not self._is_done:
            raise RequestFailed("broke off", "the stream has no end")
        if not self.tokens:
            raise RequestFailed("no tokens", "the stream brought no token")
        usage: Mapping[str, Any] = next(
            (event["usage"] for event in reversed(last) if event.get("usage")), {}
        )
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            self.sent_s,
            self.event_times_s,
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or self.tokens),
            int(details.get("cached_tokens") or 0),
        )


def _has_token(line: bytes) -> bool:
    """Tell whether an event brings a token; its text is empty when that is part of a character.

    The piece with the reason for the end, and the usage, bring none.
    """
    if b'"text"' not in line:
        return False
    return not any(empty in line for empty in EMPTY_TEXTS) or any(each in line for each in UNFINISHED)


def _event(line: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(line[len(b"data: ") :])
    except ValueError:
        raise RequestFailed("broke off", f"an event is no JSON: {line[:100]!r}") from None
    return event if isinstance(event, dict) else {}


def _kind(error: Any) -> str:
    """Return the code of an error, as OpenAI's API has it, or its type."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "error")
    return "error"


def _message(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:500]


def refusal(status: int, body: str) -> RequestFailed:
    """Return the failure for an answer that is no stream, named by its status and code: ``503 no_worker``."""
    try:
        document = json.loads(body)
        error = document.get("error", document) if isinstance(document, dict) else document
    except ValueError:
        error = body
    kind = _kind(error) if isinstance(error, dict) else ""
    return RequestFailed(
        " ".join(filter(None, (str(status), kind if kind != str(status) else ""))), _message(error)
    )


REQUEST_TIMEOUT_S = 1800.0
"""Seconds that a whole answer may take, as the frontend has it."""

MODELS_TIMEOUT_S = 10.0
"""Seconds in which the service must name its models."""


def open_client(api_key: str = "", tls: ClientTls = True) -> HttpClient:
    """Return a client, to be closed, that waits for a connection as long as for an answer."""
    return HttpClient(api_key, tls, connect_timeout_s=REQUEST_TIMEOUT_S)


async def served_model(http: HttpClient, url: str) -> str:
    """Return the first model that the service names.

    DeploymentError when it names none, or does not answer.
    """
    try:
        answer = await http.request("GET", f"{url}/v1/models", timeout_s=MODELS_TIMEOUT_S)
        if answer.status != 200:
            raise DeploymentError(
                f"{url}/v1/models answers {answer.status}: {answer.text[:300]}",
                hint="With 401, set DYNAPLAN_API_KEY or give --api-key.",
            )
        models = [str(each["id"]) for each in answer.json()["data"]]
    except OSError as error:
        raise DeploymentError(
            f"{url} does not answer: {error or type(error).__name__}",
            hint="`dynaplan status` shows what runs.",
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"{url}/v1/models is no list of models",
            hint="Expected the base address of an OpenAI-compatible API.",
        ) from error
    if not models:
        raise DeploymentError(f"{url} serves no model yet", hint="`dynaplan status` shows when one is ready.")
    return models[0]


class CompletionClient:
    """Sends prompts, which are JSON (``prompts.PromptPool``), and reads their streamed answers."""

    def __init__(self, http: HttpClient, url: str, model: str) -> None:
        self._http = http
        self._url = f"{url}/v1/completions"
        self._model = model

    async def complete(self, prompt: bytes, output_tokens: int, stream: AnswerStream | None = None) -> Answer:
        """Return an answer that is ended by nothing but its length; ``stream`` shows it while it arrives.

        Raises RequestFailed for everything but a whole answer.
        """
        stream = stream or AnswerStream()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        await self._post(self._payload(prompt, output_tokens, options), stream)
        return stream.answer()

    async def prime(self, prompt: bytes) -> None:
        """Have the prompt computed, and wait for it; raises RequestFailed.

        Not streamed: the text of one single token may be part of a character, and never be sent.
        """
        await self._post(self._payload(prompt, 1, {"stream": False}), AnswerStream())

    def _payload(self, prompt: bytes, output_tokens: int, options: dict[str, Any]) -> bytes:
        lengths = {"max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True}
        rest = {"model": self._model, **lengths, **options}
        return b'{"prompt":' + prompt + b"," + json.dumps(rest).encode()[1:]

    async def _post(self, payload: bytes, stream: AnswerStream) -> None:
        stream.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                with await self._http.send("POST", self._url, payload, JSON_BODY) as answer:
                    if answer.status != 200:
                        raise refusal(answer.status, (await answer.read()).decode(errors="replace"))
                    while data := await answer.read_some():
                        stream.take(data, time.perf_counter())
        except TimeoutError:
            raise RequestFailed("timed out", f"no whole answer within {REQUEST_TIMEOUT_S:g} s") from None
        except NotConnected as error:
            raise RequestFailed("cannot connect", str(error)) from None
        except OSError as error:
            raise RequestFailed("broke off", f"{type(error).__name__}: {error}") from None
