"""The OpenAI API of the simulated engine: reading requests, rendering answers as bytes.

Every answer is the same text, a sentence that says what this is and then filler words, cut into pieces of
four characters: one piece is one token, as the tokenizer counts. The filler starts at a place that the prompt
decides, so answers to different prompts differ, and the same prompt gets the same answer from every worker.
A streamed token is one event; the pieces are JSON-encoded once, and the rest of the event once per request.

A prompt may end with the beginning of its own answer, which the engine continues. A real model continues any
text. This one has one answer for each prompt, so it looks for the place where the prompt ends and the answer
begins: a chat says it (``continue_final_message``), and in a completion's text the answer is known by its
first words.
"""

from __future__ import annotations

import json
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynaplan.engines.timing_model.tokens import (
    BYTES_PER_TOKEN,
    is_continuation,
    prompt_token_ids,
    split_last_message,
    text_prompt,
    tokenize,
)
from dynaplan.util.documents import shown
from dynaplan.util.errors import UserError
from dynaplan.util.sockets import is_own_address
from dynaplan.util.splitmix import UniformDraws

INTRODUCTION = "This is dynaplan's simulated engine: no model runs here, the words only keep a pace."
"""The beginning of every answer: whole tokens, as the words behind it are."""

MIN_MATCH_CHARACTERS = 4
"""Characters of the introduction, one token, by which a beginning of an answer is known."""

_FILLER = frozenset(string.ascii_lowercase + " ")


def split(body: Mapping[str, Any], *, is_chat: bool) -> tuple[str, str] | None:
    """Split a prompt that ends with the beginning of its answer into its text before that, and that.

    None for a prompt that does not.
    """
    if is_chat:
        return split_last_message(body.get("messages")) if is_continuation(body) else None
    prompt = text_prompt(body, is_chat=False)
    at = _answer_start(prompt) if isinstance(prompt, str) else 0
    return (prompt[:at], prompt[at:]) if at and isinstance(prompt, str) else None


def _answer_start(prompt: str) -> int:
    """Return where an answer of this engine begins in the prompt; 0 or less where none does."""
    whole = prompt.rfind(INTRODUCTION)
    if whole > 0 and _FILLER.issuperset(prompt[whole + len(INTRODUCTION) :]):
        return whole
    for length in range(len(INTRODUCTION), MIN_MATCH_CHARACTERS - 1, -1):
        if prompt.endswith(INTRODUCTION[:length]):
            return len(prompt) - length
    return 0


FILLER_TEXT = (
    "ash bay cap dew elm fir gap hay ice jet kit log map net oak pen rye sea tin urn vow wax yew zip"
)
"""Words of one token each, with the space before it: an answer may end after any of them."""

FILLER_TOKENS = 4096
"""The length of the filler in tokens, after which it repeats."""

MIN_NATURAL_TOKENS = 48
"""The fewest tokens of an answer that ends by itself."""

NATURAL_SPREAD_TOKENS = 64
"""The number of lengths, from the fewest on, among which the prompt chooses."""

MAX_STOPS = 64
"""Texts in ``stop``; OpenAI takes 4, vLLM any number."""

DONE = b"data: [DONE]\n\n"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """The place where the KV entries of a prompt wait to be taken."""

    host: str
    port: int
    request_id: str
    tokens: int
    scheme: str = "http"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One OpenAI request, checked. ``ends_with`` is the answer's finish reason.

    ``stop`` are the texts at which the answer ends, which ``is_stop_included`` leaves in it; none is searched
    for in the first ``min_tokens``. ``characters`` is the length of an answer that ends so, else None. A
    ``prompt`` that ends with the beginning of its answer is a ``question`` and that number of characters,
    ``begun``; all other lengths are then those of the rest.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    ends_with: str
    model: str
    is_chat: bool
    is_stream: bool = False
    is_usage_included: bool = False
    remote_kv: RemoteKv | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    is_stop_included: bool = False
    characters: int | None = None
    question: tuple[int, ...] = ()
    begun: int = 0


def read_request(body: object, *, is_chat: bool, model: str, context_tokens: int) -> CompletionRequest:
    """Check a request's body; raises UserError saying what is wrong with it."""
    if not isinstance(body, Mapping):
        raise UserError("the request body must be a JSON object")
    if body.get("n") not in (None, 1):
        raise UserError(f"'n' is {shown(body['n'])}: this engine gives one answer per request (n = 1)")
    prompt = prompt_token_ids(body, is_chat=is_chat)
    room = context_tokens - len(prompt)
    if room < 1:
        raise UserError(
            f"this model's context is {context_tokens} tokens; the prompt of {len(prompt)} leaves no room"
        )
    question_text, beginning = split(body, is_chat=is_chat) or ("", "")
    question, begun = (tokenize(question_text), len(beginning)) if question_text else (prompt, 0)
    max_tokens, ends_with = _answer_tokens(body, question, begun, room)
    options = body.get("stream_options")
    return CompletionRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        ends_with=ends_with,
        model=str(body.get("model") or model),
        is_chat=is_chat,
        is_stream=body.get("stream") is True,
        is_usage_included=isinstance(options, Mapping) and options.get("include_usage") is True,
        remote_kv=_remote_kv(body.get("kv_transfer_params")),
        stop=_stop(body.get("stop")),
        min_tokens=_token_count(body, "min_tokens", 0) or 0,
        is_stop_included=body.get("include_stop_str_in_output") is True,
        question=question,
        begun=begun,
    )


def _answer_tokens(
    body: Mapping[str, Any], question: Sequence[int], begun: int, room: int
) -> tuple[int, str]:
    """Choose the answer's length in tokens and its finish reason; without a limit it ends by itself.

    Raises UserError for a limit that the context has no room for.
    """
    limit = _answer_limit(body, "max_completion_tokens") or _answer_limit(body, "max_tokens")
    if limit is not None:
        if limit > room:
            raise UserError(
                f"{limit} answer tokens are asked for; the prompt leaves room for {room} in the context"
            )
        return limit, "length"
    if body.get("ignore_eos") is True:
        return room, "length"
    natural = MIN_NATURAL_TOKENS + hash(question) % NATURAL_SPREAD_TOKENS - begun // BYTES_PER_TOKEN
    natural = max(natural, _token_count(body, "min_tokens", 0) or 0, 1)
    return (natural, "stop") if natural <= room else (room, "length")


def _answer_limit(body: Mapping[str, Any], key: str) -> int | None:
    return None if body.get(key) == -1 else _token_count(body, key, 1)


def _stop(value: Any) -> tuple[str, ...]:
    """Read the texts at which the answer ends: none, one, or a list; UserError for anything else."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    is_list = isinstance(texts, list) and len(texts) <= MAX_STOPS
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        raise UserError(
            f"'stop' is {shown(value)}: expected a text, or at most {MAX_STOPS} in a list, none empty"
        )
    return tuple(texts)


def _token_count(body: Mapping[str, Any], key: str, least: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise UserError(f"'{key}' is {shown(value)}: expected a whole number, at least {least}")
    return value


def _remote_kv(params: object) -> RemoteKv | None:
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return None
    host, port, request_id = (params.get(f"remote_{key}") for key in ("host", "port", "request_id"))
    is_here = isinstance(host, str) and (host in LOOPBACK_HOSTS or is_own_address(host))
    if not is_here or type(port) is not int or not 0 < port < 65536:
        raise UserError("'kv_transfer_params' names no worker of this machine")
    tokens = params.get("remote_num_tokens")
    scheme = "https" if params.get("remote_scheme") == "https" else "http"
    return RemoteKv(str(host), port, str(request_id), tokens if type(tokens) is int else 0, scheme)


def answer_offset(prompt: tuple[int, ...]) -> int:
    """Choose the token of the filler with which the answer to a prompt begins."""
    return hash(prompt) % FILLER_TOKENS


def _whole_words(asked: CompletionRequest) -> int | None:
    """Return the characters of an answer cut within the introduction, to whole words; None for others."""
    end = asked.max_tokens * BYTES_PER_TOKEN + asked.begun - asked.begun % BYTES_PER_TOKEN
    if end >= len(INTRODUCTION) or INTRODUCTION[end] == " ":
        return None
    return INTRODUCTION[:end].rfind(" ") - (asked.begun - asked.begun % BYTES_PER_TOKEN)


class AnswerText:
    """The text of every answer, an introduction and filler words, in pieces: JSON without quotes."""

    def __init__(self, seed: int) -> None:
        self._introduction = _pieces(INTRODUCTION)
        numbers = UniformDraws(seed)
        vocabulary = FILLER_TEXT.split()
        words = (vocabulary[int(next(numbers) * len(vocabulary))] for _ in range(FILLER_TOKENS))
        self._filler = _pieces("".join(f" {word}" for word in words))

    def apply_stops(self, asked: CompletionRequest) -> CompletionRequest:
        """Return the request as it is to be answered: no further than to the first of its stop texts.

        As in vLLM, stop texts are searched for after each token, in their order: one may begin in a token and
        end in another, its tokens are computed and counted, and the text ends before it.
        """
        if not asked.stop:
            whole = _whole_words(asked)
            return asked if whole is None else replace(asked, characters=whole)
        offset = answer_offset(asked.question)
        text = b"".join(self.pieces(offset, 0, asked.max_tokens, asked.begun)).decode()
        known = asked.begun % BYTES_PER_TOKEN
        found = [each for stop in asked.stop if (each := self._first(text, stop, asked.min_tokens, known))]
        if not found:
            return asked
        tokens, begin, end = min(found, key=lambda each: each[0])
        characters = end if asked.is_stop_included else begin
        return replace(asked, max_tokens=tokens, ends_with="stop", characters=characters)

    @staticmethod
    def _first(text: str, stop: str, min_tokens: int, known: int) -> tuple[int, int, int] | None:
        """Find a stop text that ends behind the first ``min_tokens``; None without one.

        Return the tokens up to it, and its begin and end in characters from the beginning of the first token,
        of which the ``known`` ones are not in the text.
        """
        earliest_end = min_tokens * BYTES_PER_TOKEN + 1 - known
        begin = text.find(stop, max(0, earliest_end - len(stop)))
        end = begin + len(stop) + known
        return None if begin < 0 else (-(-end // BYTES_PER_TOKEN), begin + known, end)

    def pieces(self, offset: int, start: int, stop: int, begun: int = 0) -> list[bytes]:
        """Return the tokens ``start`` to ``stop`` - 1 of the answer whose filler begins at ``offset``.

        They are counted from the token with the first character that is not ``begun``.
        """
        before, known = divmod(begun, BYTES_PER_TOKEN)
        pieces = self._pieces(offset, before + start, before + stop)
        if start == 0 and known and pieces:
            pieces[0] = pieces[0][known:]
        return pieces

    def _pieces(self, offset: int, start: int, stop: int) -> list[bytes]:
        introduction, filler = self._introduction, self._filler
        pieces = introduction[start:stop]
        shift = offset - len(introduction)
        first = start + len(pieces)
        while first < stop:
            place = (first + shift) % FILLER_TOKENS
            chunk = filler[place : place + stop - first]
            pieces += chunk
            first += len(chunk)
        return pieces


def _pieces(text: str) -> list[bytes]:
    size = BYTES_PER_TOKEN
    padded = text + " " * (-len(text) % size)
    return [json.dumps(padded[i : i + size])[1:-1].encode() for i in range(0, len(padded), size)]


class Rendering:
    """The answer to one request as bytes; ``number`` makes its id unique.

    If the request has several prompts it is the answer to the one of that ``index``, and ``prompt_tokens``
    are those of all.
    """

    def __init__(
        self, asked: CompletionRequest, text: AnswerText, number: str, index: int = 0, prompt_tokens: int = 0
    ) -> None:
        self._asked = asked
        self._text = text
        self._index = index
        self._prompt_tokens = prompt_tokens or len(asked.prompt)
        self._offset = answer_offset(asked.question)
        self._number = number
        self._created_s = int(time.time())  # the API's only wall-clock value
        prefix, kind = ("chatcmpl", "chat.completion") if asked.is_chat else ("cmpl", "text_completion")
        if asked.is_chat and asked.is_stream:
            kind += ".chunk"
        self._start = (
            f'{{"id":"{prefix}-{number}","object":"{kind}","created":{self._created_s},'
            f'"model":{json.dumps(asked.model)},"choices":['
        ).encode()
        inner, close = (b'"delta":{"content":"', b'"}') if asked.is_chat else (b'"text":"', b'"')
        self._head = b"data: " + self._start + b'{"index":%d,' % index + inner
        self._tail = close + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._last_tail = close + _finish(asked.ends_with) + b"}]}\n\n"

    def events(self, start: int, stop: int, *, is_last: bool) -> bytes:
        """Render the tokens ``start`` to ``stop`` - 1 as events; the last of all has the finish reason."""
        first = self._head
        if start == 0 and self._asked.is_chat:
            first = first.replace(b'"delta":{', b'"delta":{"role":"assistant",')
        pieces = self._pieces(start, stop)
        return first + (self._tail + self._head).join(pieces) + (self._last_tail if is_last else self._tail)

    def ending(self, emitted: int, cached: int) -> bytes:
        """Render the end of the stream after the tokens: the usage, if asked for, and ``[DONE]``."""
        if not self._asked.is_usage_included:
            return DONE
        return b'data: %b],"usage":%b}\n\n%b' % (self._start, self._usage(emitted, cached), DONE)

    def document(self, choices: Sequence[bytes], emitted: int, cached: int) -> bytes:
        return b'%b%b],"usage":%b}' % (self._start, b",".join(choices), self._usage(emitted, cached))

    def choice(self, emitted: int) -> bytes:
        content = b'"%b"' % b"".join(self._pieces(0, emitted))
        if self._asked.is_chat:
            inner = b'"message":{"role":"assistant","content":%b}' % content
        else:
            inner = b'"text":%b' % content
        return b'{"index":%d,%b%b}' % (self._index, inner, _finish(self._asked.ends_with))

    def _pieces(self, start: int, stop: int) -> list[bytes]:
        """Return the tokens' texts; those behind the end of the text are empty."""
        begun, most = self._asked.begun, self._asked.characters
        pieces = self._text.pieces(self._offset, start, stop, begun)
        if most is None:
            return pieces
        known = begun % BYTES_PER_TOKEN
        return [
            piece[: max(0, most - max(number * BYTES_PER_TOKEN, known))]
            for number, piece in enumerate(pieces, start)
        ]

    def _usage(self, emitted: int, cached: int) -> bytes:
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": emitted,
            "total_tokens": self._prompt_tokens + emitted,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return json.dumps(usage).encode()


def _finish(reason: str) -> bytes:
    return f',"logprobs":null,"finish_reason":"{reason}"'.encode()


def error_document(message: str, kind: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()


def models_document(model: str, context_tokens: int) -> dict[str, Any]:
    card = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "dynaplan",
        "max_model_len": context_tokens,
    }
    return {"object": "list", "data": [card]}
