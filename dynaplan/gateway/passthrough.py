"""Paths of the API that are passed to an engine as they are, and what of a body counts as text.

Texts count as tokens, by the estimate of ``engines/timing_model/tokens.py``; images and sounds never do,
whatever the length of their base64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from dynaplan.engines.timing_model.tokens import TEXT_PARTS, count_tokens

MESSAGES = "/v1/messages"
"""Anthropic's API, with paths of its own below."""

COUNT_TOKENS = f"{MESSAGES}/count_tokens"

SCORED = ("text_1", "text_2", "queries", "documents", "data_1", "data_2")

INPUTS: Mapping[str, tuple[str, ...]] = {
    "/v1/embeddings": ("input", "messages"),
    "/v1/rerank": ("query", "documents"),
    "/v2/rerank": ("query", "documents"),
    "/rerank": ("query", "documents"),
    "/v1/score": SCORED,
    "/score": SCORED,
    "/v1/responses": ("instructions", "input", "previous_input_messages", "prompt"),
    MESSAGES: ("system", "messages"),
    COUNT_TOKENS: ("system", "messages"),
    "/tokenize": ("prompt", "messages", "content"),
    "/detokenize": ("tokens",),
    "/pooling": ("input", "messages"),
    "/classify": ("input", "messages"),
    "/v1/audio/speech": ("input",),
}
"""Each passed path, with the fields of its body that hold what the engine reads."""

STREAMING = frozenset({"/v1/responses", MESSAGES})
"""The passed paths that generate an answer, and so may stream it: in events with names."""

UNCOMPUTED = frozenset({"/tokenize", "/detokenize", COUNT_TOKENS})
"""The passed paths for which no model computes: their texts do not count as load."""

_NOT_KEPT = "Nothing is kept here: send whole conversations to /v1/chat/completions or /v1/responses."
_NO_BATCHES = "Batches are not kept here: send their requests themselves, as many at once as you like."

UNSERVED: Mapping[str, str] = {
    "/v1/batches": _NO_BATCHES,
    "/v1/files": _NO_BATCHES,
    "/v1/uploads": _NO_BATCHES,
    "/v1/assistants": _NOT_KEPT,
    "/v1/threads": _NOT_KEPT,
    "/v1/conversations": _NOT_KEPT,
    "/v1/vector_stores": _NOT_KEPT,
    "/v1/fine_tuning": "Models are not trained here: load adapters by `lora-modules` of the workers.",
    "/v1/images": "No engine here makes images.",
    "/v1/videos": "No engine here makes videos.",
    "/v1/moderations": "No engine here has it; a model that classifies texts answers /classify.",
    "/v1/realtime": "Sessions are not kept here: send a sound in a chat, as `input_audio`.",
}
"""Paths of OpenAI's API that no engine has, and what is below them, with the reason."""

ADDRESSES = frozenset({"url", "image_url", "audio_url", "video_url", "file_url", "image", "audio", "video"})
"""The fields of a part of a message whose text is an address, or the data itself: ``data:image/png;...``."""

_MEDIA = ("image", "audio", "video", "file", "document")
_MEDIA_FIELDS = ADDRESSES - {"url"}
_DATA = ADDRESSES | {"multimodal_data"}
_CITATION = "url_citation"
"""The type of a part whose address was given to a client, in an answer that it sends back."""

_NAMES = frozenset({"type", "role"})
_SHOWN_CHARACTERS = 100


@dataclass
class Survey:
    """The contents of a request: its texts in their order, token ids, images or sounds, addresses.

    ``address`` is one that an engine would fetch; one that is no web address comes first. ``tensors`` names
    what brings an engine's own numbers in the place of an image or a text. A mark stands in ``texts`` for
    each image or sound.
    """

    texts: list[str] = field(default_factory=list)
    text_tokens: int = 0
    token_ids: int = 0
    has_media: bool = False
    address: str = ""
    tensors: str = ""

    @property
    def tokens(self) -> int:
        """The estimated number of tokens."""
        return self.text_tokens + self.token_ids

    def note_addresses(self, addresses: Iterable[str]) -> None:
        """Note what an engine would fetch."""
        for address in addresses:
            if not self.address or (is_web(self.address) and not is_web(address)):
                self.address = address[:_SHOWN_CHARACTERS] or "an empty address"

    def add_text(self, text: str, is_media: bool) -> None:
        """Keep a text and count its tokens; of an image's or a sound's keep only a hash, uncounted."""
        if is_media:
            self.texts.append(blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest())
        else:
            self.texts.append(text)
            self.text_tokens += count_tokens(text)


NOTHING = Survey()
"""The survey of a request of plain texts; not to be changed."""


def survey(values: Iterable[Any]) -> Survey:
    """Look through what a request brings, however deep it is nested."""
    found = Survey()
    left = [(value, False) for value in reversed(list(values))]
    while left:
        value, is_media = left.pop()
        if isinstance(value, str):
            found.add_text(value, is_media)
        elif isinstance(value, list):
            left += [(each, is_media) for each in reversed(value)]
        elif isinstance(value, Mapping):
            is_media = _note(value, found, is_media)
            fields = [item for item in value.items() if item[0] not in _NAMES]
            left += [(each, is_media or name in _DATA) for name, each in reversed(fields)]
        elif isinstance(value, int) and not isinstance(value, bool) and not is_media:
            found.token_ids += 1
    return found


def parts_beside_text(messages: list[dict[str, Any]]) -> list[Any]:
    """Return the parts of a chat's checked messages that are more than a text, for a survey of their own."""
    parts: list[Any] = []
    for message in messages:
        content = message.get("content")
        if content.__class__ is list:
            parts += [part for part in content if not _is_text(part)]
    return parts


def tool_addresses(tools: Any) -> Iterator[str]:
    """Yield the addresses of servers whose tools an engine would call."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("server_url"):
            yield str(tool["server_url"])


def find_unserved(path: str) -> str:
    """Return why nothing here answers a path of OpenAI's API; empty for other paths."""
    return next((why for name, why in UNSERVED.items() if f"{path}/".startswith(f"{name}/")), "")


def is_web(address: str) -> bool:
    """Return whether it begins as an address of the web does."""
    return address.lower().startswith(("http://", "https://"))


def _note(part: Mapping[str, Any], found: Survey, is_within_media: bool) -> bool:
    """Note the kind and the addresses of a part; return whether it is an image or a sound, or in one."""
    kind = part.get("type")
    kind = kind if isinstance(kind, str) else ""
    found.tensors = found.tensors or next((each for each in (kind, *part) if each.endswith("_embeds")), "")
    if kind != _CITATION:
        found.note_addresses(_addresses(part, is_within_media))
    is_media = is_within_media or any(word in kind for word in _MEDIA) or bool(_MEDIA_FIELDS & part.keys())
    found.has_media |= is_media
    return is_media


def _addresses(part: Mapping[str, Any], is_within_media: bool) -> Iterator[str]:
    for name, value in part.items():
        if isinstance(value, str) and value[:5].lower() != "data:":
            is_data = is_within_media and name == "data"  # base64 has no colon
            if name in ADDRESSES or (is_data and "://" in value[:_SHOWN_CHARACTERS]):
                yield value


def _is_text(part: Any) -> bool:
    if not isinstance(part, Mapping) or len(part) != 2 or not isinstance(part.get("type"), str):
        return False
    return isinstance(part.get(TEXT_PARTS.get(part["type"], "")), str)
