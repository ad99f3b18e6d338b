"""Masks secrets in values that are written to files and logs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
"""The text in the place of a secret."""

_SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials", "authorization"}
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_LOGIN = re.compile(r"""(?<=://)(?:[^/@\s"']|["'](?!\s*[,:}\]]))+(?=@)""")
"""The login of a URL. A quote that ends a string of JSON ends the URL too: ``{"endpoint":"tcp://*:5557",
"topic":"kv@prefill"}`` has none; any other quote may be part of a password."""


def looks_secret(name: str) -> bool:
    """Tell whether a whole word of the name means a secret: ``HF_TOKEN``, ``api-key``, not ``max-tokens``."""
    return any(word.lower() in _SECRET_WORDS for word in _WORDS.findall(name))


def mask_all(value: Any) -> Any:
    """Return the same structure with every value in it masked; keys stay."""
    if isinstance(value, Mapping):
        return {key: mask_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_all(item) for item in value]
    return MASK


def mask_secrets(value: Any) -> Any:
    """Return a JSON value without its secrets.

    These are masked: values of keys that look secret, everything in a ``ServiceArgs.envs``, the login of a
    URL, and the value of an option that looks secret on a command line, as one text or as a list. A text that
    is a JSON object or list, such as vLLM's ``kv-events-config``, is masked by its keys too.
    """
    if isinstance(value, Mapping):
        return {key: _masked_item(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _masked_list(list(value))
    return _masked_text(value) if isinstance(value, str) else value


def _masked_item(key: str, value: Any) -> Any:
    if looks_secret(key):
        return mask_all(value)
    if key == "ServiceArgs" and isinstance(value, Mapping):
        return {k: mask_all(item) if k == "envs" else _masked_item(str(k), item) for k, item in value.items()}
    return mask_secrets(value)


def _masked_list(items: list[Any]) -> list[Any]:
    """Mask every item by itself; the one after ``--api-key`` always."""
    masked = [mask_secrets(item) for item in items]
    for position, item in enumerate(items[:-1]):
        if isinstance(item, str) and item.startswith("--") and "=" not in item and looks_secret(item):
            masked[position + 1] = MASK
    return masked


def _masked_text(text: str) -> str:
    option, separator, value = text.partition("=")
    if separator and option.startswith("--") and " " not in option:
        return f"{option}={MASK if looks_secret(option) else _masked_text(value)}"
    if text.lstrip().startswith(("{", "[")):
        return _masked_json(text)
    return _URL_LOGIN.sub(MASK, text)


def _masked_json(text: str) -> str:
    """Mask a JSON text by its structure; one without secrets stays as it is written."""
    try:
        document = json.loads(text)
        masked = mask_secrets(document)
    except (ValueError, RecursionError):
        return _URL_LOGIN.sub(MASK, text)
    return text if masked == document else json.dumps(masked)
