"""As much of JSON schema as ``statefile.schema.json`` uses; an unknown keyword is an error, not a pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_CHECKS = {
    "const": lambda value, expected: value == expected,
    "enum": lambda value, expected: value in expected,
    "minimum": lambda value, expected: value >= expected,
    "pattern": lambda value, expected: re.search(expected, value) is not None,
    "required": lambda value, expected: set(expected) <= set(value),
}
_STRUCTURE = {
    "$schema",
    "$defs",
    "$ref",
    "title",
    "description",
    "type",
    "properties",
    "additionalProperties",
    "items",
}


def violations(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str = "$"
) -> Iterator[str]:
    """Where and how the value breaks the schema."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if unknown := schema.keys() - _CHECKS.keys() - _STRUCTURE:
        raise NotImplementedError(f"schema keywords {unknown}")
    if "type" in schema and not _is_one_of(value, schema["type"]):
        yield f"{where}: {value!r} is not {schema['type']}"
        return
    yield from (
        f"{where}: {key} {schema[key]}"
        for key, holds in _CHECKS.items()
        if key in schema and not holds(value, schema[key])
    )
    if isinstance(value, dict):
        named, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            yield from violations(item, named.get(key, others), root, f"{where}.{key}")
    if isinstance(value, list):
        for position, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), root, f"{where}[{position}]")


def _is_one_of(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    return not isinstance(value, bool) and any(isinstance(value, _TYPES[name]) for name in names)
