"""Masks secrets in values that are written to files and logs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

MASK = "***"
"""The text in the place of a secret."""

_SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "password", "passwd", "pass"}
    | {"credential", "credentials", "authorization"}
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_LOGIN = re.compile(r"""(?<=://)(?:[^/@\s"']|["'](?!\s*[,:}\]]))+(?=@)""")
"""The login of a URL. A quote that ends a string of JSON ends the URL too: ``{"endpoint":"tcp://*:5557",
"topic":"kv@prefill"}`` has none; any other quote may be part of a password."""


_ENVIRONMENT_FLAGS = ("-e", "--env")
"""Flags of programs that run containers, whose value is ``NAME=value``."""

_SHORT_SECRETS = ("-hft",)
"""Short flags of engines whose value is a secret."""

_NAMED_VALUE = re.compile(r"(?P<name>[A-Za-z_]\w*)=.", re.DOTALL)


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


def mask_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with its secrets masked; names of services and models are not taken for keys."""
    return {
        name: {model: mask_secrets(entry) for model, entry in section.items()}
        if name == "Models" and isinstance(section, Mapping)
        else mask_secrets(section)
        for name, section in config.items()
    }


def mask_variables(value: Any) -> Any:
    """Return a JSON value in which every variable of a ``ServiceArgs.envs`` is masked, whatever its name.

    For what is written into files: a person who looks at a dry run has typed them, and checks some.
    """
    if not isinstance(value, Mapping):
        return value
    return {
        key: mask_all(item) if key == "envs" and isinstance(item, Mapping) else mask_variables(item)
        for key, item in value.items()
    }


def mask_secrets(value: Any) -> Any:
    """Return a JSON value without its secrets.

    These are masked: values of keys that look secret, variables in ``ServiceArgs.envs`` among them, and the
    login of a URL; of a command, which is a list of words or a text below a key of that name, the values of
    options and variables that look secret, and of all variables that a container is given. A text that is a
    JSON object or list, such as vLLM's ``kv-events-config``, is masked by its keys too.
    """
    if isinstance(value, Mapping):
        return {key: _masked_item(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _masked_list(list(value))
    return _masked_text(value) if isinstance(value, str) else value


def _masked_item(key: str, value: Any) -> Any:
    if looks_secret(key):
        return mask_all(value)
    is_command = key == "command" or key.endswith("-command")
    return _masked_command(value) if is_command and isinstance(value, str) else mask_secrets(value)


def _masked_command(text: str) -> str:
    """Mask a command by its words; one without secrets stays as it is written."""
    try:
        words = shlex.split(text)
    except ValueError:
        return _masked_text(text)
    masked = _masked_list(words)
    return text if masked == words else shlex.join(masked)


def _masked_list(items: list[Any]) -> list[Any]:
    """Mask every item by itself; the one after ``--api-key`` always, and the one after ``-e``."""
    masked = [_masked_word(item) if isinstance(item, str) else mask_secrets(item) for item in items]
    for position, item in enumerate(items[:-1]):
        if not isinstance(item, str):
            continue
        if item in _SHORT_SECRETS or (item.startswith("--") and "=" not in item and looks_secret(item)):
            masked[position + 1] = MASK
        elif item in _ENVIRONMENT_FLAGS:
            masked[position + 1] = _masked_variable(items[position + 1])
    return masked


def _masked_word(word: str) -> str:
    """Mask one word of a command, which may be a text for a shell or assign a variable."""
    named = _NAMED_VALUE.match(word)
    if named and looks_secret(named["name"]):
        return f"{named['name']}={MASK}"
    is_script = any(each.isspace() for each in word) and not word.lstrip().startswith(("{", "[", "--"))
    return _masked_command(word) if is_script else _masked_text(word)


def _masked_variable(word: Any) -> Any:
    """Mask the value of a variable, but for the choice of GPUs, which is shown."""
    named = _NAMED_VALUE.match(word) if isinstance(word, str) else None
    if named is None or named["name"].endswith("VISIBLE_DEVICES"):
        return word
    return f"{named['name']}={MASK}"


def _masked_text(text: str) -> str:
    option, separator, value = text.partition("=")
    if separator and option.startswith("--") and " " not in option:
        if option in _ENVIRONMENT_FLAGS:
            return f"{option}={_masked_variable(value)}"
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
