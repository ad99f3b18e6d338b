"""Ollama's API as a translation: its requests into OpenAI's, and OpenAI's answers into its own.

Sources: ``docs/api.md`` of Ollama, and the client ``ollama`` of PyPI. All of this is pure: times are
arguments, in seconds, and become nanoseconds in answers.

1. ``/api/chat`` is a chat completion. Images become parts of a message, arguments of tool calls become text,
   and a call gets an id, which Ollama's messages do not have.
2. ``/api/generate`` is a chat completion of a system message and a prompt; with ``raw`` or a ``suffix`` a
   completion. Its ``context`` holds the messages so far, packed into numbers.
3. ``/api/embed`` and the older ``/api/embeddings`` are embeddings; texts that are too long are cut, unless
   ``truncate`` is false.
4. An answer is a stream of JSON lines unless ``stream`` is false. The last line has counts and durations:
   ``load`` until a worker took the request, ``prompt_eval`` from then to the first token, ``eval`` to the
   end.
5. ``keep_alive`` is a lease on the model from the end of the request on. Without messages or a prompt a
   request only loads the model, or unloads it with a ``keep_alive`` of 0.
6. ``/api/tags``, ``/api/ps`` and ``/api/show`` describe models, ``/api/create``, ``push`` and others are
   answered 501.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf, isfinite
from typing import Any

from dynaplan.engines.model_facts import ModelFacts
from dynaplan.gateway.openai_api import ApiError, bad_request, nested_too_deep, parse_object
from dynaplan.util.documents import shown

API_VERSION = "0.12.6"
"""The version of Ollama whose API is answered; clients look whether it is new enough for them."""

UNSUPPORTED = {
    "/api/create": "Models are declared below Models: in the configuration of `dynaplan serve`.",
    "/api/copy": "A second name for a model is one of its aliases.",
    "/api/delete": "Models are declared in the configuration of `dynaplan serve`; files are yours to delete.",
    "/api/pull": "Nothing is fetched on a client's request; `dynaplan pull` fetches a model.",
    "/api/push": "There is no registry that models could be sent to.",
    "/api/blobs": "Files of models are not taken from clients.",
}
"""The paths that are answered 501, and the sentence."""


def is_ollama(path: str) -> bool:
    """Tell whether a path is one of Ollama's API; llama-swap has others below ``/api/``."""
    return path in _PATHS or path.startswith("/api/blobs/")


_PATHS = frozenset(
    {"/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show"}
    | {"/api/version", *UNSUPPORTED}
)

LATEST = ":latest"
"""The tag that a name without one has for Ollama's clients."""

NO_IMAGE = "an image has to be a base64 text"

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Translation:
    """A request in OpenAI's terms.

    ``path`` is empty for one that only loads or unloads the model. ``is_chat`` is whether the answer has
    messages, not texts. ``keep_alive_s`` is None where the request names none, 0 for at once, infinity for
    ever. ``history`` are the texts of a conversation that goes on by ``context``, this request's the last.
    ``is_truncated``: of a text that is too long the beginning is embedded.
    """

    model: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    is_streamed: bool = True
    is_chat: bool = True
    keep_alive_s: float | None = None
    history: tuple[Mapping[str, str], ...] = ()
    is_truncated: bool = False

    @property
    def is_unload(self) -> bool:
        return not self.path and self.keep_alive_s == 0


# Requests


def error_document(message: str) -> dict[str, str]:
    """Return an error as Ollama's clients read it."""
    return {"error": message}


def chat_request(document: Document) -> Translation:
    """Translate the body of ``/api/chat``; raises ApiError (400)."""
    model, keep_alive_s = _model(document), _keep_alive(document)
    messages = document.get("messages") or []
    if not isinstance(messages, list):
        raise bad_request("messages is no list")
    if not messages:
        return Translation(model, "", is_streamed=False, keep_alive_s=keep_alive_s)
    body = {**_common(document, model), "messages": _messages(messages)}
    if document.get("tools"):
        body["tools"] = document["tools"]
    return Translation(model, "/v1/chat/completions", body, _is_streamed(document), True, keep_alive_s)


def generate_request(document: Document) -> Translation:
    """Translate the body of ``/api/generate``; raises ApiError (400)."""
    model, keep_alive_s = _model(document), _keep_alive(document)
    prompt, streamed = document.get("prompt") or "", _is_streamed(document)
    if not isinstance(prompt, str):
        raise bad_request("prompt is no text")
    if not prompt:
        return Translation(model, "", is_streamed=False, is_chat=False, keep_alive_s=keep_alive_s)
    common = _common(document, model)
    if document.get("raw") or document.get("suffix"):
        suffix = {"suffix": document["suffix"]} if document.get("suffix") else {}
        return Translation(
            model, "/v1/completions", {**common, "prompt": prompt, **suffix}, streamed, False, keep_alive_s
        )
    system = [{"role": "system", "content": document["system"]}] if document.get("system") else []
    begun = [*read_context(document.get("context")), *system]
    user = {"role": "user", "content": prompt, "images": document.get("images")}
    body = {**common, "messages": _messages([*begun, user])}
    history = (*begun, {"role": "user", "content": prompt})
    return Translation(model, "/v1/chat/completions", body, streamed, False, keep_alive_s, history)


def embed_request(document: Document) -> Translation:
    """Translate the body of ``/api/embed``, or of the older ``/api/embeddings``; raises ApiError (400)."""
    model = _model(document)
    texts = document.get("input", document.get("prompt"))
    if not texts:
        return Translation(model, "", is_streamed=False, keep_alive_s=_keep_alive(document))
    body: dict[str, Any] = {"model": model, "input": texts}
    if document.get("dimensions"):
        body["dimensions"] = document["dimensions"]
    is_truncated = document.get("truncate") is not False
    keep_alive_s = _keep_alive(document)
    return Translation(model, "/v1/embeddings", body, False, False, keep_alive_s, is_truncated=is_truncated)


TRANSLATORS: Mapping[str, Callable[[Document], Translation]] = {
    "/api/chat": chat_request,
    "/api/generate": generate_request,
    "/api/embed": embed_request,
    "/api/embeddings": embed_request,
}
"""The paths of requests that an engine answers, and what translates them."""


def translate(path: str, body: bytes) -> tuple[Translation, bytes]:
    """Translate a request for one of the paths of ``TRANSLATORS``.

    Returns the translation with an empty body, and its body encoded. Raises ApiError (400) for one that is no
    JSON object or cannot be translated.
    """
    try:
        asked = TRANSLATORS[path](parse_object(body or b"{}"))
        return replace(asked, body={}), json.dumps(asked.body).encode()
    except RecursionError:
        raise nested_too_deep() from None


def _model(document: Document) -> str:
    name = document.get("model") or document.get("name")
    if not isinstance(name, str) or not name:
        raise bad_request("model is required")
    return name


def _is_streamed(document: Document) -> bool:
    return document.get("stream") is not False


SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop"),
        *("presence_penalty", "frequency_penalty", "repeat_penalty", "repeat_last_n"),
        *("mirostat", "mirostat_eta", "mirostat_tau"),
    }
)
"""Options of a request that have the same names in OpenAI's, or in engines beside it. What is decided when a
model is loaded (``num_ctx``, ``num_gpu``, ``num_thread`` and others) is the owner's, and left out."""


def _common(document: Document, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": _is_streamed(document)}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    options = document.get("options") or {}
    if not isinstance(options, Mapping):
        raise bad_request("options is no object")
    body |= {key: value for key, value in options.items() if key in SAMPLING and value is not None}
    most = options.get("num_predict")
    if isinstance(most, int) and most > 0:
        body["max_tokens"] = most
    wanted = document.get("format")
    if wanted == "json":
        body["response_format"] = {"type": "json_object"}
    elif isinstance(wanted, Mapping):
        schema = {"name": "answer", "schema": wanted}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    thinks = document.get("think")
    if isinstance(thinks, bool):
        body["chat_template_kwargs"] = {"enable_thinking": thinks}
    elif isinstance(thinks, str):
        body["reasoning_effort"] = thinks
    return body


def _messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages in OpenAI's form; the results of tools follow the calls in their order."""
    translated = []
    open_ids: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise bad_request("a message is no object")
        own: dict[str, Any] = {"role": message.get("role", "user"), "content": _content(message)}
        if calls := _list(message, "tool_calls"):
            own["tool_calls"] = [_call(call, f"call_{number}_{index}") for index, call in enumerate(calls)]
            open_ids = [(each["function"]["name"], each["id"]) for each in own["tool_calls"]]
        if own["role"] == "tool":
            own["tool_call_id"] = _answered_call(message, open_ids)
        translated.append(own)
    return translated


def _answered_call(message: Document, open_ids: list[tuple[str, str]]) -> str:
    """Return the id of the call that a tool's result answers, by name, else the first; remove that call."""
    name = message.get("tool_name") or message.get("name")
    found = next((each for each in open_ids if each[0] == name), open_ids[0] if open_ids else None)
    if found is None:
        return str(message.get("tool_call_id") or "call")
    open_ids.remove(found)
    return found[1]


def _call(call: Any, call_id: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad_request("a tool call has no function")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }


def _content(message: Document) -> Any:
    text, images = message.get("content") or "", _list(message, "images")
    if not images:
        return text
    if not all(isinstance(each, str) for each in images):
        raise bad_request(NO_IMAGE)
    parts = [{"type": "image_url", "image_url": {"url": _data_url(each)}} for each in images]
    return [*([{"type": "text", "text": text}] if text else []), *parts]


def _list(message: Document, name: str) -> list[Any]:
    found = message.get(name) or []
    if not isinstance(found, list):
        raise bad_request(f"{name} is no list")
    return found


_IMAGE_KINDS = {"iVBOR": "png", "/9j/": "jpeg", "R0lGO": "gif", "UklGR": "webp"}
"""How the base64 form of an image begins, by its kind: that of its first bytes."""


def _data_url(image: str) -> str:
    kind = next((each for begin, each in _IMAGE_KINDS.items() if image.startswith(begin)), "png")
    return f"data:image/{kind};base64,{image}"


# 2. a conversation as numbers

MAX_CONTEXT_BYTES = 1024 * 1024
"""Bytes of a conversation that goes on by ``context``; one that is longer is not given to the client."""


def write_context(history: Iterable[Mapping[str, str]]) -> list[int]:
    """Return a conversation as the numbers of ``context``, which clients send back as they are.

    Ollama's are token ids; these are the bytes of the messages, packed, so that any engine can go on.
    """
    text = json.dumps(list(history), ensure_ascii=False).encode()
    return list(zlib.compress(text)) if len(text) <= MAX_CONTEXT_BYTES else []


def read_context(numbers: Any) -> list[dict[str, str]]:
    """Return the conversation of a ``context``; raises ApiError (400) for one that was not given here."""
    if not numbers:
        return []
    try:
        unpacked = zlib.decompressobj().decompress(bytes(numbers), MAX_CONTEXT_BYTES)
        messages = json.loads(unpacked)
        return [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError):
        raise bad_request("context is not one that this service has given; leave it out") from None


# 3. texts that are too long

_TOKENS = re.compile(r"\d+")
MAX_CUTS = 6
"""Times that texts are cut at most until the engine takes them."""


def cut_texts(body: bytes, fault: str) -> bytes:
    """Return a request for embeddings whose longest texts are cut, by an engine's sentence about its limit.

    That names two numbers of tokens, what was asked and what is possible; without them a half is cut.
    """
    document = json.loads(body)
    asked = document["input"]
    texts = [asked] if isinstance(asked, str) else list(asked)
    numbers = [int(each) for each in _TOKENS.findall(fault) if int(each) > 1]
    part = 0.95 * min(numbers) / max(numbers) if len(set(numbers)) > 1 else 0.5
    longest = max((len(each) for each in texts if isinstance(each, str | list)), default=0)
    cut = [each[: max(1, int(longest * part))] if isinstance(each, str | list) else each for each in texts]
    return json.dumps({**document, "input": cut[0] if isinstance(asked, str) else cut}).encode()


# 5. leases

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_CHARACTERS = 64
"""The longest text that is read as a duration: the time for it grows with the square of its length."""


def keep_alive_s(value: Any) -> float | None:
    """Return the seconds of a ``keep_alive``: a number of them, or Go's ``1h30m``; below 0 is for ever.

    None without one. Raises ApiError (400) for something else.
    """
    if value is None or value == "":
        return None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return inf if value < 0 else float(value)
        if isinstance(value, str) and len(value) <= _MAX_CHARACTERS:
            return _duration_s(value.strip())
    except OverflowError:
        pass
    raise _no_duration(value)


def _duration_s(text: str) -> float | None:
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", text):
        return keep_alive_s(float(text))
    unsigned = text.lstrip("+-")
    parts = _DURATION.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        raise _no_duration(text)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return inf if text.startswith("-") and seconds else seconds


def _no_duration(value: Any) -> ApiError:
    return bad_request(
        f"keep_alive is {shown(value)}, which is no number of seconds and no duration such as 5m"
    )


def _keep_alive(document: Document) -> float | None:
    return keep_alive_s(document.get("keep_alive"))


# Answers


def timestamp(at_unix_s: float) -> str:
    """Return a moment as Ollama writes it: RFC 3339."""
    return datetime.fromtimestamp(at_unix_s, UTC).isoformat().replace("+00:00", "Z")


def line(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def load_answer(asked: Translation, path: str, at_unix_s: float) -> dict[str, Any]:
    """Return the answer to a request for that path of Ollama's which only loads or unloads the model."""
    if path in ("/api/embed", "/api/embeddings"):
        return {"model": asked.model, "embeddings": []} if path == "/api/embed" else {"embedding": []}
    empty = {"message": {"role": "assistant", "content": ""}} if asked.is_chat else {"response": ""}
    reason = "unload" if asked.is_unload else "load"
    return {
        "model": asked.model,
        "created_at": timestamp(at_unix_s),
        **empty,
        "done": True,
        "done_reason": reason,
    }


@dataclass
class OllamaAnswer:
    """The answer to one request as it comes in: from OpenAI's events, or from one whole document.

    Moments are on one clock; ``admitted_s`` is when a worker took the request.
    """

    asked: Translation
    arrived_s: float
    admitted_s: float
    unix_offset_s: float = 0.0
    first_token_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = "stop"
    _texts: list[str] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def on_event(self, event: Document, now_s: float) -> bytes:
        """Return the line for one event of a stream; empty where it brings nothing that the client is
        told."""
        self._count(event)
        choice = _first(event.get("choices"))
        delta = choice.get("delta") or {}
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for call in delta.get("tool_calls") or ():
            self._collect(call)
        text = delta.get("content") or choice.get("text") or ""
        thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if not text and not thinking:
            return b""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self._texts.append(text)
        return line({**self._head(now_s), **self._part(text, thinking), "done": False})

    def on_end(self, now_s: float) -> bytes:
        """Return the lines that end a stream: the calls of tools, if there are any, and the counts."""
        calls = self._tool_calls()
        told = b""
        if calls:
            message = {"role": "assistant", "content": "", "tool_calls": calls}
            told = line({**self._head(now_s), "message": message, "done": False})
        return told + line({**self._head(now_s), **self._part("", ""), **self._end(now_s)})

    def on_document(self, document: Document, now_s: float) -> dict[str, Any]:
        """Return the answer to a request without a stream."""
        self._count(document)
        choice = _first(document.get("choices"))
        message = choice.get("message") or {}
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for index, call in enumerate(message.get("tool_calls") or ()):
            self._collect({"index": index, **call})
        text = message.get("content") or choice.get("text") or ""
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        part = self._part(text, thinking)
        self._texts.append(text)
        if (calls := self._tool_calls()) and self.asked.is_chat:
            part["message"]["tool_calls"] = calls
        return {**self._head(now_s), **part, **self._end(now_s)}

    def on_embeddings(self, document: Document, now_s: float) -> dict[str, Any]:
        """Return the answer of ``/api/embed``."""
        self._count(document)
        vectors = [each.get("embedding") for each in document.get("data") or ()]
        return {
            "model": self.asked.model,
            "embeddings": vectors,
            "total_duration": _ns(now_s - self.arrived_s),
            "load_duration": _ns(self.admitted_s - self.arrived_s),
            "prompt_eval_count": self.prompt_tokens,
        }

    def on_failure(self, message: str) -> bytes:
        """Return the line that tells of a failure in a stream that has begun."""
        return line(error_document(message))

    def _count(self, document: Document) -> None:
        usage = document.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
        self.output_tokens = usage.get("completion_tokens") or self.output_tokens

    def _collect(self, call: Document) -> None:
        """Add a part of a tool call: its name comes once, its arguments in pieces."""
        function = call.get("function") or {}
        own = self._calls.setdefault(int(call.get("index") or 0), {"name": "", "arguments": ""})
        own["name"] += function.get("name") or ""
        own["arguments"] += function.get("arguments") or ""

    def _tool_calls(self) -> list[dict[str, Any]]:
        return [
            {"function": {"name": call["name"], "arguments": _arguments(call["arguments"])}}
            for _, call in sorted(self._calls.items())
        ]

    def _head(self, now_s: float) -> dict[str, Any]:
        return {"model": self.asked.model, "created_at": timestamp(now_s + self.unix_offset_s)}

    def _part(self, text: str, thinking: str) -> dict[str, Any]:
        thought = {"thinking": thinking} if thinking else {}
        if self.asked.is_chat:
            return {"message": {"role": "assistant", "content": text, **thought}}
        return {"response": text, **thought}

    def _end(self, now_s: float) -> dict[str, Any]:
        first_s = now_s if self.first_token_s is None else self.first_token_s
        history, answer = self.asked.history, {"role": "assistant", "content": "".join(self._texts)}
        context = write_context([*history, answer]) if history else []
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            **({"context": context} if context else {}),
            "total_duration": _ns(now_s - self.arrived_s),
            "load_duration": _ns(self.admitted_s - self.arrived_s),
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": _ns(first_s - self.admitted_s),
            "eval_count": self.output_tokens,
            "eval_duration": _ns(now_s - first_s),
        }


def _first(items: Any) -> Document:
    return items[0] if items else {}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return {"arguments": text}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def embeddings_of_one(answer: Document) -> dict[str, Any]:
    """Turn an answer of ``/api/embed`` into one of the older ``/api/embeddings``."""
    return {"embedding": next(iter(answer["embeddings"]), [])}


# 6. models


@dataclass(frozen=True)
class OllamaModel:
    """A model as far as it is known. ``loaded_bytes`` is the memory that it takes where it is loaded, 0 if
    unknown, and ``context_tokens`` its context there."""

    name: str
    facts: ModelFacts
    loaded_bytes: int = 0
    is_on_gpu: bool = False
    context_tokens: int = 0
    expires_unix_s: float = inf

    def _entry(self) -> dict[str, Any]:
        name = self.name if ":" in self.name else f"{self.name}{LATEST}"
        return {"name": name, "model": name, "digest": self.facts.digest, "details": _details(self.facts)}


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": facts.format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _rounded(facts.parameters),
        "quantization_level": facts.quantization,
    }


def _rounded(parameters: int) -> str:
    """Return a number of parameters as Ollama writes it: ``8.0B``, ``134.52M``; empty for none."""
    for size, unit, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if parameters >= size:
            return f"{parameters / size:.{digits}f}{unit}"
    return str(parameters or "")


def tags_document(models: Iterable[OllamaModel]) -> dict[str, Any]:
    """Return the answer of ``/api/tags``: all models, loaded or not, with the sizes of their files."""
    entries = [
        {
            **each._entry(),
            "size": each.facts.size_bytes,
            "modified_at": timestamp(each.facts.modified_unix_s),
        }
        for each in models
    ]
    return {"models": entries}


NEVER = "9999-12-31T23:59:59Z"
NEVER_UNIX_S = 253_402_300_799.0
"""The same moment, the last that a date can tell."""


def ps_document(models: Iterable[OllamaModel]) -> dict[str, Any]:
    """Return the answer of ``/api/ps``: the loaded models, and when each leaves if nobody asks for it.

    A size is that in memory, and never less than the file's: what has been measured so far may be less.
    """
    entries = []
    for each in models:
        size = max(each.loaded_bytes, each.facts.size_bytes)
        leaves = NEVER if each.expires_unix_s >= NEVER_UNIX_S else timestamp(each.expires_unix_s)
        entries.append(
            {
                **each._entry(),
                "size": size,
                "size_vram": size if each.is_on_gpu else 0,
                "expires_at": leaves,
                "context_length": each.context_tokens,
            }
        )
    return {"models": entries}


def show_document(model: OllamaModel, *, is_verbose: bool = False) -> dict[str, Any]:
    """Return the answer of ``/api/show``: what the file's header says; lists only if ``is_verbose``."""
    facts, family = model.facts, model.facts.family or "unknown"
    info: dict[str, Any] = {"general.architecture": family}
    if model.context_tokens:
        info[f"{family}.context_length"] = model.context_tokens
    for name, value in facts.metadata.items():
        is_told = isfinite(value) if isinstance(value, float) else is_verbose or not isinstance(value, tuple)
        info[name] = value if is_told else None
    if facts.parameters:
        info["general.parameter_count"] = facts.parameters
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": f"num_ctx                        {model.context_tokens}"
        if model.context_tokens
        else "",
        "template": facts.chat_template,
        "details": _details(facts),
        "model_info": info,
        "capabilities": list(facts.capabilities),
        "modified_at": timestamp(facts.modified_unix_s),
    }
