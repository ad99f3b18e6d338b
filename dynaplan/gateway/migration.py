"""Go on with a stream at another worker when the one that answers dies.

A language model's next token depends on nothing but the tokens before it. So what a dead worker has computed
is lost, and what it has sent is not: the prompt followed by the text that the client has got already is a
prompt whose answer is the rest. Four steps follow from that.

1. **Keep** (``PartialAnswer``). While a stream passes, its events are kept as bytes. They are parsed only
   when the worker dies, or when all streams have kept too many, into the text that they hold.
2. **Ask** (``make_continuation``). Another worker gets the client's request with the partial answer at the
   end of its prompt: as the beginning of a completion's prompt, or as an unfinished message of the assistant
   that the engine is asked to continue. The limits of tokens shrink by the tokens that are there.
3. **Splice** (``Splice``). The new stream's events get the id and the time of the first one, its second
   role is left out, and its usage is added up.
4. **Mind the seam.** Chat templates strip the white space at a message's end, and a text that ends within
   a token is continued badly. So the white space at the end of the partial answer is not sent, and is left
   out of the continuation's beginning when it is there again.

With greedy decoding the spliced text is that of an uncut answer, but for differences in rounding between two
workers; with a temperature it is another sample that agrees with the first one up to the seam. A request
whose rest depends on more than the text so far does not migrate: ``find_obstacle`` lists those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from dynaplan.engines.api_rules import EngineApi
from dynaplan.engines.timing_model.tokens import count_tokens
from dynaplan.gateway.client import Client
from dynaplan.gateway.openai_api import Call


class MigratableStream:
    """The one stream to a client, whatever number of workers it takes to write it.

    ``asked`` is the client's request, ``limit`` the number of times that it may migrate. To continue it
    elsewhere the answer so far is kept as ``partial``, in a budget of ``pages`` that all streams share; it is
    None for a stream that cannot migrate.
    """

    __slots__ = ("_client", "_limit", "_splice", "asked", "migrations", "partial")

    def __init__(self, client: Client, asked: Call, api: EngineApi, limit: int, pages: UnreadPages) -> None:
        self._client = client
        self.asked = asked
        self.partial = PartialAnswer(pages) if limit and may_migrate(asked, api) else None
        self._limit = limit
        self._splice: Splice | None = None
        self.migrations = 0

    def close(self) -> None:
        """Release what is kept: the stream has ended."""
        if self.partial:
            self.partial.close()

    async def write(self, events: bytes) -> bytes:
        """Send whole events to the client, and keep them; return what was sent: other bytes once spliced."""
        if self._splice:
            events = self._splice.splice(events)
        if self.partial:
            self.partial.add(events)
        if events:
            await self._client.write(events)
        return events

    @property
    def is_spliced(self) -> bool:
        """True when ``write`` changes events.

        When False, the caller may send them to the client itself, and then adds them to ``partial``.
        """
        return self._splice is not None

    def is_complete(self) -> bool:
        """Tell whether only the mark of the end is missing; False for a stream that keeps nothing."""
        return self.partial is not None and is_complete(self.asked, self.partial)

    def find_obstacle(self, tokens: int, api: EngineApi) -> str:
        """Return why no other worker can go on after that number of tokens; empty when one can."""
        if self.partial is None:
            return "such a request does not migrate"
        if self.migrations == self._limit:
            return f"it has migrated {self._limit} times"
        return find_obstacle(self.asked, self.partial, tokens, api)

    def migrate(self, tokens: int, api: EngineApi) -> Call:
        """Return the request for the rest of the answer; from now on ``write`` is given its events."""
        assert self.partial is not None
        rest = make_continuation(self.asked, self.partial.text(), tokens, api)
        self._splice = Splice(self.partial, rest)
        self.migrations += 1
        return rest.call


# -- 1. keep ------------------------------------------------------------------------------------------

PAGE_BYTES = 64 * 1024
"""Bytes of events, some 300 tokens, that each stream may keep before it asks for more room."""

MAX_PAGES = 512
"""Further pages that all streams of a process have together: 32 MiB."""

MAX_PAGES_OF_REQUEST = 16
"""Further pages of one stream: to read as many events takes the event loop some 5 ms."""

MAX_TEXT_CHARACTERS = 1024 * 1024
"""Characters of an answer that are kept; a longer answer does not migrate."""

_DATA = b"data: "
_END = b"\n\n"
_OTHER_PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal", "audio")


_FRAME = re.compile(rb'(.*?"(?:content|text)":")((?:[^"\\]++|\\.)*+)(".*)', re.DOTALL)
"""One event's line around its text."""

_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""The inside of a JSON text."""


@dataclass(frozen=True)
class _Frame:
    """The bytes before and behind the text of an event: engines write the same into nearly all of them.

    Reading by it takes a hundredth of the time of reading each event as JSON.
    """

    head: bytes
    tail: bytes

    @classmethod
    def around(cls, text: str, line: bytes) -> _Frame | None:
        """Return the frame of a line whose event has this text; None where the line has another form."""
        found = _FRAME.fullmatch(line)
        is_text = found is not None and json.loads(b'"%b"' % found[2]) == text
        return cls(found[1], found[3]) if found and is_text else None

    def cut(self, events: bytes) -> tuple[bytes, str, bytes] | None:
        """Cut out the events in this frame; return those before them, their text, and those behind them.

        None where these do not follow each other.
        """
        start, end = events.find(self.head), events.rfind(self.tail + _END) + len(self.tail)
        framed = events[start:end] if start >= 0 else b""
        # At single bytes, and put together again to be compared: to search for more takes ten times as long.
        texts = [each[len(self.head) : -len(self.tail)] for each in framed.split(b"\n")[::2]]
        inside = b"".join(texts)
        if self.head + (self.tail + _END + self.head).join(texts) + self.tail != framed:
            return None
        if not _TEXT.fullmatch(inside):
            return None
        try:
            text = json.loads(b'"%b"' % inside)
        except ValueError:
            return None
        return events[:start], str(text), events[end:]


class UnreadPages:
    """The room that the streams of a process have for events which they have not read."""

    def __init__(self) -> None:
        self._left = MAX_PAGES

    def take(self) -> bool:
        """Take a page of the budget; False when none is left."""
        if self._left:
            self._left -= 1
            return True
        return False

    def give_back(self, pages: int) -> None:
        """Return that number of pages, for other streams."""
        self._left += pages


class PartialAnswer:
    """The events of one stream so far, read into their text when it is asked for, or when room runs out.

    Events are added to ``unread``; when it has more than ``room_bytes``, ``grow_or_read`` is to be called.
    ``answer_id`` and ``created_s`` are those of the first event. ``finish_reason`` is empty until an event
    has one. ``oddity`` says what in the answer is no plain text of one choice, empty when all of it is.
    """

    __slots__ = (
        *("_characters", "_frame", "_pages", "_taken_pages", "_texts", "answer_id", "created_s"),
        *("finish_reason", "has_usage", "oddity", "room_bytes", "unread"),
    )

    def __init__(self, pages: UnreadPages) -> None:
        self._pages = pages
        self._taken_pages = 0
        self.unread = bytearray()  # one piece of memory: an object for each event would be in no cache
        self._frame: _Frame | None = None
        self.room_bytes = PAGE_BYTES
        self._texts: list[str] = []
        self._characters = 0
        self.answer_id: Any = None
        self.created_s: Any = None
        self.finish_reason = ""
        self.has_usage = False
        self.oddity = ""

    def add(self, events: bytes) -> None:
        """Keep whole events that are being passed on."""
        self.unread += events
        if len(self.unread) > self.room_bytes:
            self.grow_or_read()

    def grow_or_read(self) -> None:
        """Take a page more, or read what is kept where there is none; what is odd is not kept."""
        if self.oddity:
            self.unread.clear()
        elif self._taken_pages < MAX_PAGES_OF_REQUEST and self._pages.take():
            self._taken_pages += 1
            self.room_bytes += PAGE_BYTES
        else:
            self._read()

    def close(self) -> None:
        """Keep nothing any more."""
        self.unread, self.room_bytes = bytearray(), PAGE_BYTES
        if self._taken_pages:
            self._pages.give_back(self._taken_pages)
            self._taken_pages = 0

    def text(self) -> str:
        """Return the text of the answer so far."""
        self._read()
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def _read(self) -> None:
        events, at = b"" if self.oddity else bytes(self.unread), 0
        self.close()
        while self._frame is None and at < len(events):
            end = events.find(b"\n", at) + 1 or len(events)
            self._read_line(events[at:end].rstrip(b"\n"))
            at = end
        self._read_framed(events[at:])
        if self._characters > MAX_TEXT_CHARACTERS:
            self._texts, self.oddity = [], f"has more than {MAX_TEXT_CHARACTERS} characters"

    def _read_framed(self, events: bytes) -> None:
        """Read the events in the frame as a whole, and each of the others."""
        if self._frame and (parts := self._frame.cut(events)):
            before, text, events = parts
            for line in before.split(b"\n"):
                self._read_line(line)
            self._add_text(text)
        for line in events.split(b"\n"):
            self._read_line(line)

    def _read_line(self, line: bytes) -> None:
        if document := parse_event(line):
            self._read_document(document, line)

    def _add_text(self, text: str) -> None:
        self._texts.append(text)
        self._characters += len(text)

    def _read_document(self, document: dict[str, Any], line: bytes) -> None:
        if self.answer_id is None:
            self.answer_id, self.created_s = document.get("id"), document.get("created")
        self.has_usage = self.has_usage or isinstance(document.get("usage"), dict)
        for choice in document.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index"):
                self.oddity = "has several choices"
                return
            text = self._read_choice(choice)
            is_plain = not (self.oddity or self.finish_reason or self.has_usage)
            if self._frame is None and text and is_plain and len(document["choices"]) == 1:
                self._frame = _Frame.around(text, line)

    def _read_choice(self, choice: dict[str, Any]) -> str:
        """Add one choice of an event to the answer so far; return its text."""
        delta = choice.get("delta")
        part = delta if isinstance(delta, dict) else choice
        if odd := [name for name in _OTHER_PARTS if part.get(name)]:
            self.oddity = f"has {odd[0]}"
        text = part.get("content") if part is delta else part.get("text")
        text = text if isinstance(text, str) else ""
        self._add_text(text)
        self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
        return text


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of one line of a stream; None when it holds none."""
    if not line.startswith(_DATA):
        return None
    try:
        document = json.loads(line[len(_DATA) :])
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


# -- 2. ask -------------------------------------------------------------------------------------------

MAX_BODY_BYTES = 1024 * 1024
"""Bytes of a request that migrates at most: its body is parsed and rewritten in the event loop."""

_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Fields that bound the answer's length from above, in tokens."""

_GRAMMARS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("grammar", "json_schema", "regex", "ebnf", "structural_tag"),
)
"""Fields that bind the answer to a grammar, which an engine follows from the answer's beginning only."""

_BOUND_TO_THE_WHOLE = ("echo", "suffix", "prompt_logprobs", "use_beam_search", "return_token_ids", "audio")
"""Fields whose effect is on the prompt, or on the answer as a whole."""

_BINDING = frozenset((*_GRAMMARS, *_BOUND_TO_THE_WHOLE))
_MAY_BIND = _BINDING | {"response_format", "tools"}
_NUMBERS_OF_ANSWERS = ("n", "best_of", "n_cmpl")


@dataclass(frozen=True)
class Continuation:
    """A request for the rest of an answer.

    ``tokens`` are those of the answer so far, as far as they were sent. ``held`` is the white space at the
    end of the text so far, which was not sent and may come again: in tokens of its own, for which the
    request leaves room, or in one with more. ``left_tokens`` is the number that the client may still get,
    None without a limit.
    """

    call: Call
    tokens: int
    held: str
    left_tokens: int | None = None


def may_migrate(call: Call, api: EngineApi) -> bool:
    """Return whether the stream is worth keeping: ``find_obstacle`` finds nothing yet."""
    return call.is_stream and not _find_obstacle_in_request(call, call.document, api)


def is_complete(call: Call, partial: PartialAnswer) -> bool:
    """Return whether nothing but the mark of its end is missing from the answer."""
    partial.text()
    options = call.document.get("stream_options")
    is_usage_asked_for = isinstance(options, dict) and bool(options.get("include_usage"))
    is_plain = not partial.oddity
    return is_plain and bool(partial.finish_reason) and (partial.has_usage or not is_usage_asked_for)


def find_obstacle(call: Call, partial: PartialAnswer, tokens: int, api: EngineApi) -> str:
    """Return why no other worker can continue the answer of ``tokens`` so far, empty when one can."""
    text = partial.text()
    if partial.oddity:
        return f"the answer {partial.oddity}"
    if partial.finish_reason:
        return "the answer has ended, but for its usage"
    document = parse_whole(call)
    if any(isinstance(document.get(name), int) and 0 <= document[name] <= tokens for name in _LIMITS):
        return "the answer has all its tokens"
    if document.get("logprobs") and text[-1:].isspace():
        # What is cut at the seam is text; the probabilities are of whole tokens.
        return "its log probabilities cannot be put together at white space"
    return _find_obstacle_in_request(call, document, api)


def make_continuation(call: Call, text: str, tokens: int, api: EngineApi) -> Continuation:
    """Return the request for what follows ``text``, the ``tokens`` of the answer that the client has got."""
    sent = text.rstrip()
    held = text[len(sent) :]
    tokens = tokens if sent else 0
    document = {**parse_whole(call)}
    limits = {name: document[name] for name in _LIMITS if isinstance(document.get(name), int)}
    left_tokens = min((limit for limit in limits.values() if limit > 0), default=None)
    if left_tokens is not None:
        left_tokens -= tokens
    room_tokens = len(held) if sent else 0
    document |= {name: limit - tokens + room_tokens for name, limit in limits.items() if limit > 0}
    if isinstance(document.get("min_tokens"), int):
        document["min_tokens"] = max(0, document["min_tokens"] - tokens)
    if sent and call.endpoint.is_chat:
        document |= {"messages": _append_to_messages(document["messages"], sent), **(api.continuation or {})}
    elif sent:
        document["prompt"] += sent
    prompt = call.prompt + sent if isinstance(call.prompt, str) else call.prompt
    return Continuation(
        replace(
            call,
            body=json.dumps(document).encode(),
            document=document,
            prompt=prompt,
            prompt_tokens=call.prompt_tokens + count_tokens(sent),
            is_whole=True,
        ),
        tokens,
        held,
        left_tokens,
    )


def parse_whole(call: Call) -> Mapping[str, Any]:
    """Return the request as a JSON object, with the prompt that a large body's ``document`` lacks."""
    document: Mapping[str, Any] = call.document if call.is_whole else json.loads(call.body)
    return document


def _append_to_messages(messages: list[Any], text: str) -> list[Any]:
    """Add the text to the messages: as one more, or to the unfinished one that the client has sent."""
    if _is_unfinished(messages):
        return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]
    return [*messages, {"role": "assistant", "content": text}]


def _is_unfinished(messages: list[Any]) -> bool:
    return isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _find_obstacle_in_request(call: Call, document: Mapping[str, Any], api: EngineApi) -> str:
    """Return the reason that lies in the request; ``document`` may lack the prompt of a large body."""
    if api.continuation is None:
        return "its engine cannot continue an answer"
    if call.endpoint.inputs or call.prompts > 1:
        return "it is no chat, and no completion of one prompt"
    if len(call.body) > MAX_BODY_BYTES:
        return f"its body has more than {MAX_BODY_BYTES} bytes"
    for name in _NUMBERS_OF_ANSWERS:
        if (document.get(name) or 1) != 1:
            return "several answers were asked for"
    if document.get("seed") is not None and document.get("temperature") != 0:
        return "it has a seed"
    if not _MAY_BIND.isdisjoint(document) and (bound := _find_binding_field(document)):
        return f"it has {bound!r}"
    if call.endpoint.is_chat:
        return _find_obstacle_in_chat(document)
    return _find_obstacle_in_prompt(document, call)


def _find_binding_field(document: Mapping[str, Any]) -> str:
    """Return the name of a field that binds the form of the whole answer; empty when there is none."""
    form = document.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        return "response_format"
    if document.get("tools") and document.get("tool_choice") not in (None, "auto", "none"):
        return "tool_choice"
    names = _BINDING & document.keys()
    return min(filter(document.get, names), default="") if names else ""


def _find_obstacle_in_chat(document: Mapping[str, Any]) -> str:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages or not _is_unfinished(messages):
        return ""
    is_to_be_continued = document.get("continue_final_message") and isinstance(
        messages[-1].get("content"), str
    )
    return "" if is_to_be_continued else "its last message is the assistant's"


def _find_obstacle_in_prompt(document: Mapping[str, Any], call: Call) -> str:
    if document.get("logprobs") is not None:
        return "its log probabilities are counted from the answer's beginning"
    return (
        ""
        if isinstance(call.prompt, str) and isinstance(document.get("prompt", ""), str)
        else ("its prompt is a list")
    )


# -- 3. splice, 4. mind the seam ------------------------------------------------------------------------


class Splice:
    """Rewrites a continuation's events.

    Its usage counts the first part of the answer as prompt, as the engine saw it; the client gets what
    an uncut answer would have had. The two may differ by a token, where one spans the seam.
    """

    def __init__(self, partial: PartialAnswer, continuation: Continuation) -> None:
        self._partial = partial
        self._tokens = continuation.tokens
        self._left_tokens = continuation.left_tokens
        self._held = continuation.held
        self._is_dropped = False

    def splice(self, events: bytes) -> bytes:
        """Return these whole events as they go to the client; empty when nothing of them does."""
        return b"".join(self._splice_line(line) for line in events.splitlines(keepends=True))

    def _splice_line(self, line: bytes) -> bytes:
        document = parse_event(line)
        if document is None:
            is_end_of_dropped = self._is_dropped and not line.strip()
            self._is_dropped = False
            return b"" if is_end_of_dropped else line
        document["id"], document["created"] = self._partial.answer_id, self._partial.created_s
        choices = document.get("choices")
        usage = document.get("usage")
        if isinstance(usage, dict):
            self._adjust_usage(usage)
        elif choices and not any(self._cut_choice(each) for each in choices):
            self._is_dropped = True
            return b""
        return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    def _cut_choice(self, choice: Any) -> bool:
        """Cut from a choice what the client has already; tell whether anything is left of it."""
        if not isinstance(choice, dict):
            return True
        delta = choice.get("delta")
        part, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        is_first = part.pop("role", None) is not None and not part.get(name)
        is_passed_on = not is_first and (not part.get(name) or self._cut_token(part, name))
        return is_passed_on or bool(choice.get("finish_reason"))

    def _cut_token(self, part: dict[str, Any], name: str) -> bool:
        """Cut from a token's text what the client has, all at its limit; False when nothing is to be sent."""
        if self._held:
            part[name] = self._cut_white_space(part[name])
            if not part[name]:
                self._tokens -= 1  # it is computed a second time
                return False
        if self._left_tokens == 0:
            self._tokens -= 1
            part[name] = ""
            return False
        if self._left_tokens is not None:
            self._left_tokens -= 1
        return True

    def _cut_white_space(self, text: str) -> str:
        """Cut the held white space from the beginning of the text, as far as it is there again."""
        held, common = self._held, 0
        while common < min(len(held), len(text)) and held[common] == text[common]:
            common += 1
        self._held = held[common:] if common == len(text) else ""
        return text[common:]

    def _adjust_usage(self, usage: dict[str, Any]) -> None:
        for name, sign in (("prompt_tokens", -1), ("completion_tokens", 1)):
            if isinstance(usage.get(name), int):
                usage[name] = max(0, usage[name] + sign * self._tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], usage.get("prompt_tokens") or 0)
