"""``--Service.key=value``: options of services on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.config.settings.fields import kebab
from dynaplan.util.errors import ConfigError

MODELS = "Models"
"""The section of several models."""

PLANNER = "Planner"
"""The section of the planner, and below a model the one of the model's own."""

PREFILL = "prefill"
"""Below a model: the options of its prefill workers."""

BELOW_ENTRY = (PLANNER, PREFILL, "ServiceArgs", "resources")
"""The keys of a model that have keys below them."""

MODEL_SETS = "ModelSets"
"""The section of what may be loaded together: ``together``, lists of names. Without it memory decides."""

OVERRIDE = re.compile(r"--[^=.\s-][^=.\s]*\.[^=]*(=.*)?", re.DOTALL)
DIGITS = re.compile(r"-?[0-9]{1,300}", re.ASCII)
ONE_DOT = re.compile(r"-?([0-9]+\.[0-9]*|\.[0-9]+)", re.ASCII)
NEGATIVE = re.compile(r"-[0-9.]", re.ASCII)

Sections = dict[str, dict[str, Any]]


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides, and the other arguments, each in their order; ConfigError without a value.

    An override is written ``--Service.key=value``, ``--Service.key value`` or ``--Service.key = value``; the
    first part of the answer has them all in the first spelling. Nothing after ``--`` is one.
    """
    overrides: list[str] = []
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        token = waiting.pop(0)
        if token == "--":
            return overrides, [*rest, token, *waiting]
        if not OVERRIDE.fullmatch(token):
            rest.append(token)
        elif "=" in token:
            overrides.append(token)
        else:
            overrides.append(f"{token}={_value_after(token, waiting)}")
    return overrides, rest


def parse_overrides(arguments: Sequence[str]) -> Sections:
    """The overrides as nested mappings, deep-merged in their order; raises ConfigError for anything else."""
    overrides, rest = split_overrides(arguments)
    if rest:
        raise ConfigError(f"not an option of a service: {rest[0]}", hint="Write --Service.key=value.")
    sections: Sections = {}
    for override in overrides:
        name, _, text = override.removeprefix("--").partition("=")
        path = name.strip().split(".")
        if not all(path):
            raise ConfigError(f"Error parsing service arg: {override}", hint="Write --Service.key=value.")
        if path[0] == MODELS and len(path) > 2:  # a model's name may have dots
            keys = next((place for place, key in enumerate(path) if place > 1 and key in BELOW_ENTRY), -1)
            path = [MODELS, ".".join(path[1:keys]), *path[keys:]]
        value: Any = typed_value(path, text)
        for key in reversed(path[1:]):
            value = {key: value}
        sections = merge_sections(sections, {path[0]: value})
    return sections


def typed_value(path: Sequence[str], text: str) -> Any:
    """The value of the text: JSON, else digits, else digits with one dot, else true or false, else text.

    Environment variables (``Service.ServiceArgs.envs.*``) are always text.
    """
    if list(path[1:3]) == ["ServiceArgs", "envs"] and len(path) > 3:
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    if DIGITS.fullmatch(text):
        return int(text)
    if ONE_DOT.fullmatch(text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def merge_sections(
    below: Mapping[str, Mapping[str, Any]], above: Mapping[str, Mapping[str, Any]]
) -> Sections:
    """Both configurations, deep-merged; ``above`` wins. ``max_len`` and ``max-len`` are one option."""
    merged = {name: dict(section) for name, section in below.items()}
    for name, section in above.items():
        own = merged.get(name, {})
        spelling = {kebab(key): key for key in own}
        merged[name] = deep_merge(
            own, {spelling.get(kebab(key), key): value for key, value in section.items()}
        )
    return merged


def deep_merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both as a new mapping: mappings merge at every level, any other value of ``above`` wins."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def sections_of(arguments: Sequence[str], known: Sequence[str]) -> Sections:
    """``--Section.key=value`` by section, values read as YAML; ConfigError for an unknown section."""
    sections: Sections = {name: {} for name in known}
    for service, section in parse_overrides(arguments).items():
        if service not in sections:
            raise ConfigError(f"--{service}.…: unknown section", hint=f"Expected {' or '.join(sections)}.")
        sections[service] |= section
    return sections


def _value_after(token: str, waiting: list[str]) -> str:
    """Remove the value of ``token`` from the ``waiting`` arguments and return it; raises ConfigError."""
    if waiting and waiting[0] == "=":
        waiting.pop(0)
    elif waiting and waiting[0].startswith("="):
        return waiting.pop(0)[1:]
    if waiting and (not waiting[0].startswith("-") or NEGATIVE.match(waiting[0])):
        return waiting.pop(0)
    raise ConfigError(f"Error parsing service arg: {token}", hint=f"It has no value; write {token}=value.")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
