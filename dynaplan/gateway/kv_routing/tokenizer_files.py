"""A model's tokenizer and chat template, as files of its Hugging Face directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"
"""The file without which there is no tokenizer here: those of other forms only their engines can read."""

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"

WITH_TOOLS, DEFAULT = "tool_use", "default"
"""Names of templates, where a model has several."""

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class ChatFiles:
    """The text of a model's chat templates, by name, and the special tokens that they may name."""

    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, Any] = field(default_factory=dict)


def model_directory(model: str, environment: Mapping[str, str]) -> Path | None:
    """Return the directory with a model's tokenizer; ``model`` is a path, or a name on the Hugging Face hub.

    A name is searched for where Hugging Face's library keeps what it has downloaded; None when there is none.
    """
    try:
        for directory in (Path(os.path.expanduser(model)), *_snapshots(model, environment)):
            if (directory / TOKENIZER).is_file():
                return directory
    except (OSError, ValueError, RuntimeError):
        return None
    return None


def _snapshots(model: str, environment: Mapping[str, str]) -> list[Path]:
    home = environment.get("HF_HOME") or f"{environment.get('HOME') or '~'}/.cache/huggingface"
    cache = Path(os.path.expanduser(environment.get("HF_HUB_CACHE") or f"{home}/hub"))
    place = cache / f"models--{model.replace('/', '--')}"
    reference = place / "refs" / "main"
    return [place / "snapshots" / reference.read_text().strip()] if reference.is_file() else []


def read_chat_files(directory: Path, template: str = "") -> ChatFiles:
    """Read a model's templates and special tokens; ``template``, a path or a text, stands for its own.

    Raises OSError or ValueError for files that cannot be read.
    """
    config = _object(directory / CONFIG)
    tokens = _object(directory / SPECIAL_TOKENS) | config
    return ChatFiles(_templates(directory, config, template), _special_tokens(tokens))


def _templates(directory: Path, config: Mapping[str, Any], template: str) -> dict[str, str]:
    if template:
        is_text = "\n" in template or "{" in template
        return {DEFAULT: template if is_text else Path(os.path.expanduser(template)).read_text()}
    found = config.get("chat_template")
    if (directory / TEMPLATE).is_file():
        found = (directory / TEMPLATE).read_text()
    if isinstance(found, str):
        return {DEFAULT: found}
    named = found if isinstance(found, list) else []
    return {str(each["name"]): str(each["template"]) for each in named if {"name", "template"} <= set(each)}


def _special_tokens(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens by the names that templates have for them, as in ``bos_token``."""
    named = {f"{name}_token": tokens.get(f"{name}_token") for name in _NAMED_TOKENS}
    found: dict[str, Any] = {name: text for name, value in named.items() if (text := _text(value))}
    others = tokens.get("additional_special_tokens")
    if isinstance(others, list):
        found["additional_special_tokens"] = [text for each in others if (text := _text(each))]
    return found


def _text(token: object) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _object(file: Path) -> dict[str, Any]:
    document = json.loads(file.read_text()) if file.is_file() else {}
    if not isinstance(document, dict):
        raise ValueError(f"{file} holds no object")
    return document
