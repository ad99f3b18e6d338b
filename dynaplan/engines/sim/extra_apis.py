"""The simulated engine's answers on other paths than completions: responses, embeddings, tokens.

A response is a chat in another form. An embedding depends on nothing but its text, so that it is the same
from every worker; it means nothing.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from dynaplan.engines.sim.api import Rendering
from dynaplan.engines.timing_model.tokens import is_token, prompt_token_ids
from dynaplan.util.documents import shown
from dynaplan.util.errors import UserError
from dynaplan.util.splitmix import UniformDraws

DEFAULT_DIMENSIONS = 64
"""Numbers of an embedding that no ``dimensions`` are asked for."""

MAX_DIMENSIONS = 4096


def chat_of_response(body: Any) -> dict[str, Any]:
    """Turn the body of a response into that of a chat; raises UserError for an invalid one."""
    if not isinstance(body, Mapping):
        raise UserError("the request body must be a JSON object")
    asked, instructions = body.get("input"), body.get("instructions")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(messages, list) or not messages:
        raise UserError(f"'input' is {shown(asked)}: expected a text, or a list of messages")
    before = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    names = ("model", "stream", "temperature")
    return {
        **{name: body[name] for name in names if name in body},
        "messages": [*before, *messages],
        "max_tokens": body.get("max_output_tokens"),
    }


class ResponseRendering(Rendering):
    """The answer to a request on ``/v1/responses``: one message, streamed in events with names."""

    _event_count = 0
    """Events that were rendered."""

    def events(self, start: int, stop: int, *, is_last: bool) -> bytes:
        """Render the tokens ``start`` to ``stop`` as events; before token 0 those that begin a message."""
        begin = b""
        if start == 0:
            created = self._response("in_progress", [], None)
            begin = self._event("response.created", response=created)
            begin += self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress", [])
            )
            begin += self._event("response.content_part.added", **self._position(), part=_part(""))
        deltas = (
            self._event("response.output_text.delta", **self._position(), delta=_text(piece), logprobs=[])
            for piece in self._pieces(start, stop)
        )
        return begin + b"".join(deltas)

    def ending(self, emitted: int, cached: int) -> bytes:
        """Render the end of the stream: the message once more, and the response with its usage."""
        text = self._whole_text(emitted)
        item = self._item(self._status, [_part(text)])
        return b"".join(
            (
                self._event("response.output_text.done", **self._position(), text=text, logprobs=[]),
                self._event("response.content_part.done", **self._position(), part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{self._status}", response=self._completed(emitted, cached)),
            )
        )

    def document(self, choices: Sequence[bytes], emitted: int, cached: int) -> bytes:
        return json.dumps(self._completed(emitted, cached)).encode()

    def _completed(self, emitted: int, cached: int) -> dict[str, Any]:
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": emitted,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_tokens + emitted,
        }
        item = self._item(self._status, [_part(self._whole_text(emitted))])
        return self._response(self._status, [item], usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._asked.ends_with == "length" else "completed"

    def _response(self, status: str, output: list[Any], usage: Any) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._asked.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        item_id = f"msg_{self._number}"
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _position(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._number}", "output_index": 0, "content_index": 0}

    def _whole_text(self, emitted: int) -> str:
        return _text(b"".join(self._pieces(0, emitted)))

    def _event(self, name: str, **fields: Any) -> bytes:
        document = {"type": name, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return f"event: {name}\ndata: {json.dumps(document)}\n\n".encode()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text(encoded: bytes) -> str:
    """Decode pieces of an answer, which are JSON without quotes."""
    return str(json.loads(b'"%b"' % encoded))


def embedding_prompts(body: Any, context_tokens: int) -> list[tuple[int, ...]]:
    """Return the token ids of each text that is to be embedded; raises UserError for an invalid one."""
    if not isinstance(body, Mapping):
        raise UserError("the request body must be a JSON object")
    asked: Any = body.get("input")
    is_list = isinstance(asked, list) and bool(asked) and isinstance(asked[0], str | list)
    texts = asked if is_list else [asked]
    try:
        prompts = [prompt_token_ids({"prompt": each}, is_chat=False) for each in texts]
    except UserError:
        raise UserError(f"'input' is {shown(asked)}: expected a text, token ids, or a list of them") from None
    longest = max(map(len, prompts))
    if longest >= context_tokens:
        raise UserError(
            f"this model's context is {context_tokens} tokens; the input of {longest} leaves no room"
        )
    return prompts


def embeddings_document(
    body: Mapping[str, Any], prompts: Sequence[tuple[int, ...]], model: str
) -> dict[str, Any]:
    """Compose the answer: one vector of length 1 for each text; raises UserError for a wrong option."""
    dimensions, encoding = (
        body.get("dimensions") or DEFAULT_DIMENSIONS,
        body.get("encoding_format") or "float",
    )
    if type(dimensions) is not int or not 0 < dimensions <= MAX_DIMENSIONS:
        raise UserError(f"'dimensions' is {shown(dimensions)}: expected a number from 1 to {MAX_DIMENSIONS}")
    if encoding not in ("float", "base64"):
        raise UserError(f"'encoding_format' is {shown(encoding)}: expected 'float' or 'base64'")
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(_vector(prompt, dimensions), encoding)}
        for index, prompt in enumerate(prompts)
    ]
    tokens = sum(map(len, prompts))
    return {
        "object": "list",
        "data": data,
        "model": body.get("model") or model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _vector(prompt: tuple[int, ...], dimensions: int) -> list[float]:
    numbers = [2 * draw - 1 for draw in islice(UniformDraws(hash(prompt)), dimensions)]
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def tokenize_response(body: Any, context_tokens: int) -> dict[str, Any]:
    """Compose the answer of ``/tokenize`` in vLLM's form; raises UserError for a body without a prompt."""
    if not isinstance(body, Mapping):
        raise UserError("the request body must be a JSON object")
    tokens = prompt_token_ids(body, is_chat="messages" in body)
    return {"count": len(tokens), "max_model_len": context_tokens, "tokens": tokens, "token_strs": None}


def detokenize(body: Any) -> str:
    """Return the text of a list of token ids; raises UserError for anything else."""
    tokens = body.get("tokens") if isinstance(body, Mapping) else None
    if not isinstance(tokens, list) or not all(map(is_token, tokens)):
        raise UserError(f"'tokens' is {shown(tokens)}: expected a list of token ids")
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return packed.rstrip(b"\0").decode("utf-8", "replace")
