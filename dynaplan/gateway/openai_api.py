"""The part of the OpenAI API that the frontend needs: reading and checking requests, the shape of errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynaplan.engines.api_rules import TOOL_FIELDS, EngineApi
from dynaplan.engines.timing_model.tokens import count_tokens, text_prompt
from dynaplan.gateway.passthrough import (
    INPUTS,
    NOTHING,
    STREAMING,
    UNCOMPUTED,
    Survey,
    is_web,
    parts_beside_text,
    survey,
    tool_addresses,
)
from dynaplan.util.errors import UserError

log = logging.getLogger(__name__)

SET_BY_SERVER = frozenset(
    {
        "kv_transfer_params",
        "disaggregated_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "kv_slot_file",
    }
)
"""Fields that name the KV entries an engine takes over: hosts, files, slots. A client may not set them."""


CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code of an error about a prompt that is longer than the context."""

UNKNOWN_URL = "unknown_url"
"""The code of an error about a path that is not there."""

CONTEXT_ADVICE = "Shorten the prompt, or have the model started with a larger context."


MAX_TEXTS = 2048
"""Texts in one request at most, prompts or others: OpenAI's own limit for embeddings."""


class ApiError(Exception):
    """An error answer to a client; ``kind`` is OpenAI's ``type``, ``metric`` the metrics' ``error_type``.

    ``error_forms`` writes it in the form of the API that was asked.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        metric: str = "validation",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.metric = metric
        self.headers = dict(headers or {})
        self.document = {"message": message, "type": kind, "param": param, "code": code}

    def to_json(self) -> bytes:
        """Write the error in OpenAI's form: ``{"error": {...}}``."""
        return json.dumps({"error": self.document}).encode()


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Make an error 400: the client must change its request."""
    return ApiError(400, message, param=param, code=code)


def nested_too_deep() -> ApiError:
    """Make an error 400 of a RecursionError: the parser of JSON accepts deeper nesting than its writers."""
    return bad_request("The body is nested too deep.", code="invalid_json")


def no_worker(message: str, retry_after_s: int = 1) -> ApiError:
    """Make an error 503: no worker can answer now, but one may in that number of seconds."""
    return ApiError(
        503,
        message,
        kind="service_unavailable",
        code="no_worker",
        metric="unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def out_of_descriptors(limit: int) -> ApiError:
    """Make an error 503: this process may open no further connection. The log says it too."""
    message = (
        f"The frontend has {limit} files and connections open, which is its limit (ulimit -n). Try again "
        "later; its operator can raise the hard limit before `dynaplan serve`."
    )
    log.error("%s", message)
    return ApiError(
        503,
        message,
        kind="service_unavailable",
        code="out_of_descriptors",
        metric="overload",
        headers={"Retry-After": "5"},
    )


def no_such_path(path: str) -> ApiError:
    """Make an error 404: the engine that serves the model lacks that path of the API; of sounds 501."""
    message = f"The engine that serves this model has no {path}, or not for a model of this kind."
    if path.startswith("/v1/audio/"):
        return not_implemented(message)
    return ApiError(404, message, code=UNKNOWN_URL, metric="not_found")


def not_implemented(message: str, *, code: str = "not_implemented") -> ApiError:
    """Make an error 501: nothing here can do that, and asking again does not help."""
    return ApiError(
        501,
        message,
        code=code,
        metric="not_implemented",
        headers={"X-Should-Retry": "false"},  # OpenAI's clients try again after any 5xx but such a one
    )


def worker_failed(message: str) -> ApiError:
    """Make an error 502: workers tried, and failed."""
    return ApiError(502, message, kind="server_error", code="worker_failed", metric="internal")


def needs_local_prefill() -> ApiError:
    """Make an error 400: only a decode worker could compute the prompt, and none here can."""
    return bad_request(
        "The decode workers here cannot compute a prompt, and images, sounds, lists of prompts and other "
        "paths than completions are not computed for them. Send one prompt of text.",
        code="needs_local_prefill",
    )


def internal_error() -> ApiError:
    """Make an error 500: a fault of the frontend's own."""
    return ApiError(
        500, "The frontend failed; its log says how", kind="server_error", code="internal", metric="internal"
    )


JSON_TYPE = "application/json"


@dataclass(frozen=True)
class ApiPath:
    """A path of the API that workers answer; ``name`` is the metrics' label.

    ``inputs`` are the fields with what the engine reads, on a path that is passed to it as it is; a path
    without any is a completion or a chat. ``streams``: its answers may be streams. ``is_computed``: a model
    reads its texts. ``is_form``: its requests are no JSON, but a form with files.
    """

    path: str
    name: str
    is_chat: bool
    inputs: tuple[str, ...] = ()
    streams: bool = True
    is_computed: bool = True
    is_form: bool = False


CHAT_COMPLETIONS = ApiPath("/v1/chat/completions", "chat_completions", is_chat=True)
COMPLETIONS = ApiPath("/v1/completions", "completions", is_chat=False)
PASSTHROUGH = tuple(
    ApiPath(
        path,
        path.rpartition("/")[2],
        is_chat=False,
        inputs=inputs,
        streams=path in STREAMING,
        is_computed=path not in UNCOMPUTED,
    )
    for path, inputs in INPUTS.items()
)
FORMS = tuple(
    ApiPath(path, path.rpartition("/")[2], is_chat=False, inputs=("file",), streams=False, is_form=True)
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations")
)
API_PATHS = {endpoint.path: endpoint for endpoint in (CHAT_COMPLETIONS, COMPLETIONS, *PASSTHROUGH, *FORMS)}
"""Every path that workers answer."""


@dataclass(frozen=True)
class PromptBlocks:
    """The chained hashes of a prompt's full KV blocks of ``tokens`` tokens; empty unless routed by prefix.

    A chained hash covers the block and all blocks before it, so equal hashes mean equal prefixes. Where the
    model's tokens are known, ``prompt_tokens`` is their number, and engines that tell of their blocks have
    them under the same hashes; 0: the blocks are cut from the text by an estimate.
    """

    hashes: tuple[int, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0


NO_BLOCKS = PromptBlocks()


class Call(msgspec.Struct, frozen=True):
    """One checked request. ``body`` holds the client's bytes, ``document`` the same, parsed.

    ``prompt`` is a text or a sequence of token ids; of a path that is passed as it is, all its texts.
    ``prompt_tokens`` is its length: exact for token ids, estimated with the simulated engine's tokenizer for
    a text. Unless it ``is_whole``, as of a large body, ``document`` lacks the prompt's text and ``prompt`` is
    only the beginning. Of several ``prompts`` it is the first, and all of them count. ``address`` is one that
    an engine would fetch, of several one that is no web address if there is any. ``has_media``: there are
    images or sounds in it, which count as no tokens. ``content_type`` is that of the body.
    """

    endpoint: ApiPath
    body: bytes
    document: Mapping[str, Any]
    model: str
    is_stream: bool
    prompt: str | tuple[int, ...]
    prompt_tokens: int
    is_whole: bool = True
    prompts: int = 1
    address: str = ""
    has_media: bool = False
    content_type: str = JSON_TYPE

    @property
    def can_be_remote(self) -> bool:
        """True when another worker can compute its prompt for the one that answers: it is one, of text."""
        return not self.endpoint.inputs and self.prompts == 1 and not self.has_media

    @property
    def prompt_text(self) -> str:
        """The prompt's text; empty when it came as token ids."""
        return self.prompt if isinstance(self.prompt, str) else ""

    def body_with(self, fields: Mapping[str, Any]) -> bytes:
        """Return the client's body with these fields added; its bytes stay unless it has such a field.

        Raises ApiError (400) for a large body that has one.
        """
        if not fields:
            return self.body
        if double := sorted(name for name in fields if name in self.document):
            if not self.is_whole:
                raise bad_request(f"{double[0]!r} is set by the server in a body of this size; leave it out")
            # Which of two equal keys an engine reads is not for us to guess.
            return json.dumps({**self.document, **fields}).encode()
        added = json.dumps(fields, separators=(",", ":")).encode()
        # The body is a JSON object with at least a model in it, so it ends in "}" and needs the comma.
        return self.body.rstrip()[:-1] + b"," + added[1:]


def parse_call(endpoint: ApiPath, body: bytes) -> Call:
    """Read and check a request's body; raises ApiError (400) with the fault."""
    document = parse_object(body)
    _check_types(document)
    try:
        prompts, prompt_tokens, found = (
            _read_passthrough(endpoint, document) if endpoint.inputs else _prompts(endpoint, document)
        )
    except RecursionError:
        raise nested_too_deep() from None
    if found.tensors:
        raise bad_request(f"{found.tensors!r} are not taken from clients", code="invalid_field")
    return Call(
        endpoint=endpoint,
        body=body,
        document=document,
        model=document["model"],
        is_stream=endpoint.streams and (document.get("stream") or False),
        prompt=prompts[0],
        prompt_tokens=prompt_tokens,
        prompts=len(prompts),
        address=found.address,
        has_media=found.has_media,
    )


_Prompt = str | tuple[int, ...]


def _read_passthrough(endpoint: ApiPath, document: Mapping[str, Any]) -> tuple[list[_Prompt], int, Survey]:
    """Return a forwarded request's prompt (its texts), its number of token ids to compute, and its
    contents."""
    if not endpoint.streams:
        for name in endpoint.inputs:
            _check_number(name, document.get(name))
    found = survey(document[name] for name in endpoint.inputs if name in document)
    found.note_addresses(tool_addresses(document.get("tools")))
    return ["".join(found.texts)], found.tokens if endpoint.is_computed else 0, found


def _prompts(endpoint: ApiPath, document: Mapping[str, Any]) -> tuple[list[_Prompt], int, Survey]:
    """Read the prompts of a completion, or a chat's only one, with its images and sounds."""
    name = "messages" if endpoint.is_chat else "prompt"
    value: Any = document.get(name)
    try:
        if endpoint.is_chat:
            prompt = text_prompt(document, is_chat=True)
            parts = parts_beside_text(value)
            return [prompt], _length(prompt), survey(parts) if parts else NOTHING
        bodies: list[Mapping[str, Any]] = [document]
        if _is_list_of_prompts(value):
            _check_number(name, value)
            bodies = [{"prompt": [each]} for each in value]
        prompts = [text_prompt(each, is_chat=False) for each in bodies]
    except UserError as error:
        raise bad_request(str(error), param=name) from None
    return prompts, sum(map(_length, prompts)), NOTHING


def _is_list_of_prompts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(each, str | list) for each in value)


def _check_number(name: str, value: Any) -> None:
    """Raise ApiError (400) for more texts than one request may bring; token ids are bounded by the body."""
    is_many = isinstance(value, list) and len(value) > MAX_TEXTS
    if is_many and not all(isinstance(each, int) for each in value):
        raise bad_request(f"{name!r} has {len(value)} entries; at most {MAX_TEXTS} in a request", param=name)


def _length(prompt: _Prompt) -> int:
    return count_tokens(prompt) if isinstance(prompt, str) else len(prompt)


def estimate_tokens(call: Call) -> int:
    """Return about how many tokens a request's texts have."""
    text = call.prompt if call.is_whole else call.body.decode(errors="replace")
    return _length(text)


def check_media(address: str, allows_urls: bool) -> None:
    """Raise ApiError (400) for an address that an engine would fetch, unless that is allowed.

    Files of the engine's machine are never allowed.
    """
    if address and not (allows_urls and is_web(address)):
        advice = "Send the data itself, as data:image/png;base64,..."
        if is_web(address):
            advice += ", or have the service started with --Frontend.allow-media-urls=true"
        raise bad_request(
            f"{address!r} would be fetched by the engine. {advice}.",
            code="media_address",
        )


def check_passed(document: Mapping[str, Any], allows_urls: bool) -> None:
    """Raise ApiError (400) for what no client may send to an engine, on whatever path."""
    _check_server_fields(document)
    found = survey(document.values())
    if found.tensors:
        raise bad_request(f"{found.tensors!r} are not taken from clients", code="invalid_field")
    check_media(found.address, allows_urls)


def check_fields(call: Call, api: EngineApi, owners: Collection[str] = ()) -> None:
    """Raise ApiError (400 or 404) for what the engine has not: a path, a field, or a value in it.

    ``owners`` are the fields that the model's owner has set: they are not a client's to be refused for.
    """
    path = call.endpoint.path
    if call.prompts > 1 and call.is_stream and not api.streams_lists:
        raise bad_request("This engine does not stream the answers to a list of prompts.", param="stream")
    document = call.document
    if owners:
        document = {name: value for name, value in document.items() if name not in owners}
    if fault := api.fault(document, path):
        raise bad_request(fault.message, param=fault.name, code="invalid_field")


def check_and_loosen_tools(call: Call, api: EngineApi, card: Mapping[str, Any]) -> Call:
    """Return the call with schemas of tools that its engine accepts; large bodies and forms are not read.

    Raises ApiError (400) where a tool must be called and the model's chat template knows none.
    """
    if "tool_choice" in call.document:
        _check_tools(call, card)
    if TOOL_FIELDS.isdisjoint(call.document) or call.endpoint.is_form or not call.is_whole:
        return call
    loosened = api.loosened_tools(call.document, call.endpoint.path)
    if not loosened:
        return call
    document = {**call.document, **loosened}
    return msgspec.structs.replace(call, document=document, body=json.dumps(document).encode())


def _check_tools(call: Call, card: Mapping[str, Any]) -> None:
    choice = call.document["tool_choice"]
    # Anthropic's choice is an object whatever it asks for; one that leaves it to the model demands nothing.
    is_required = choice == "required" or (isinstance(choice, Mapping) and choice.get("type") != "auto")
    if is_required and call.document.get("tools") and card.get("lacks_tools"):
        raise bad_request(
            "The chat template of this model has no tools, so none would be called. Leave 'tool_choice' out, "
            "or have a chat-template with tools set for the worker.",
            param="tool_choice",
            code="no_tools",
        )


def check_context(call: Call, context_tokens: int) -> None:
    """Raise ApiError (400) when the prompt is longer than the context, in tokens; 0 means unknown."""
    is_one = call.prompts == 1 and not call.endpoint.inputs  # of several each has the context for itself
    if is_one and context_tokens and call.prompt_tokens > context_tokens:
        raise bad_request(
            f"This model's maximum context length is {context_tokens} tokens, and the prompt alone has "
            f"{call.prompt_tokens}. {CONTEXT_ADVICE}",
            param="messages" if call.endpoint.is_chat else "prompt",
            code=CONTEXT_CODE,
        )


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a body that is to be a JSON object; raises ApiError (400)."""
    try:
        try:
            document = msgspec.json.decode(body)
        except msgspec.DecodeError:  # what the quick reader does not take Python's own may, as engines do
            # Not json.loads(body): it would take UTF-16 too, which a worker may read otherwise.
            document = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise bad_request("The body must be a JSON object")
    return document


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which Python reads in JSON and engines do not, or not as numbers."""
    raise ValueError(f"{name} is no JSON number")


_LEAST = {"max_tokens": -1, "max_completion_tokens": -1, "n": 1}
"""The least numbers. -1 is the word of LM Studio's and llama.cpp's clients for "no limit"."""


def _check_types(document: Mapping[str, Any]) -> None:
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("'model' must be a non-empty text", param="model")
    if not isinstance(document.get("stream"), bool | None):
        raise bad_request("'stream' must be true or false", param="stream")
    for name, least in _LEAST.items():
        value = document.get(name)
        if value is not None and (not _is_whole(value) or value < least):
            raise bad_request(f"{name!r} must be a whole number, and at least {least}", param=name)
    _check_server_fields(document)


def _is_whole(value: Any) -> bool:
    """Tell whether this is a whole number, as JSON has them: ``3.0`` is one."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _check_server_fields(document: Mapping[str, Any]) -> None:
    if named := SET_BY_SERVER & document.keys():
        name = min(named)
        raise bad_request(f"{name!r} is set by the server", param=name)
