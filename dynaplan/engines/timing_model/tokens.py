"""The simulated engine's tokenizer, also for routers and planners that count or hash the engine's prompts.

One token is four bytes of UTF-8, about what a trained tokenizer makes of English. Appending to a text
leaves all its tokens but the last as they were: equal beginnings give equal tokens, as prefix caching needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from dynaplan.util.errors import UserError

BYTES_PER_TOKEN = 4
"""The bytes of UTF-8 in one token."""

MAX_TOKEN_ID = 2**32 - 1

TEXT_PARTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thinking",
    "refusal": "refusal",
}
"""The types of a message's parts that are text -> the field with the text. vLLM takes the same types."""


def tokenize(text: str) -> tuple[int, ...]:
    """Return the token ids of the text; the last token is padded with zero bytes."""
    encoded = text.encode("utf-8", "replace")
    count = -(-len(encoded) // BYTES_PER_TOKEN)
    return struct.unpack(f"<{count}I", encoded.ljust(count * BYTES_PER_TOKEN, b"\0"))


def count_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def chat_text(messages: object) -> str:
    """Return a chat as one text that ends with the assistant's turn; UserError for what is no chat."""
    if not isinstance(messages, list) or not messages:
        raise UserError("'messages' must be a non-empty list of messages")
    turns = [f"<|{_role(message)}|>\n{_content(message)}\n" for message in messages]
    return "".join(turns) + "<|assistant|>\n"


def prompt_token_ids(body: Mapping[str, Any], *, is_chat: bool) -> tuple[int, ...]:
    """Return the prompt of an OpenAI request body as token ids; raises UserError when it holds none."""
    prompt = text_prompt(body, is_chat=is_chat)
    return tokenize(prompt) if isinstance(prompt, str) else prompt


def text_prompt(body: Mapping[str, Any], *, is_chat: bool) -> str | tuple[int, ...]:
    """Return the prompt of an OpenAI request body, one text or one sequence of token ids; UserError if none.

    A completion's ``prompt`` is a text, a list of token ids, or a list with one of these. As in vLLM, a chat
    with ``continue_final_message`` ends with the beginning of an answer, its last message.
    """
    if is_chat:
        messages = body.get("messages")
        return chat_text(messages) if not is_continuation(body) else "".join(split_last_message(messages))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(is_token, prompt)):
        return tuple(prompt)
    raise UserError("'prompt' must be a text, a list of token ids, or a list with one of these; not empty")


def is_continuation(body: Mapping[str, Any]) -> bool:
    """Tell whether the chat's last message is the beginning of the answer that is asked for."""
    return body.get("continue_final_message") is True


def split_last_message(messages: object) -> tuple[str, str]:
    """Split a chat that is to be continued into its text before the answer, and the answer's beginning."""
    if not isinstance(messages, list) or len(messages) < 2 or _role(messages[-1]) != "assistant":
        raise UserError("'continue_final_message' needs a last message of the assistant, after others")
    return chat_text(messages[:-1]), _content(messages[-1])


def is_token(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _role(message: object) -> str:
    # Nearly every one is a dict, which the abstract class takes four times as long to tell.
    if isinstance(message, (dict, Mapping)) and isinstance(message.get("role"), str):
        return str(message["role"])
    raise UserError("every message must be an object with a 'role'")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part_text(part) for part in content)
    raise UserError("a message's 'content' must be a text or a list of parts")


def _part_text(part: object) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise UserError("every part of a message's 'content' must be an object with a 'type'")
    name = TEXT_PARTS.get(part["type"])
    if name is None:
        return _media_marker(part)
    if isinstance(part.get(name), str):
        return str(part[name])
    raise UserError(f"a part of the type {part['type']!r} must have a text as {name!r}")


def _media_marker(part: Mapping[str, Any]) -> str:
    """Return what stands for an image or a sound: a short hash of the part in place of its data."""
    document = json.dumps(part, sort_keys=True, default=str).encode("utf-8", "replace")
    return f"<|{part['type'][:20]} {blake2b(document, digest_size=8).hexdigest()}|>"
