"""Readers of what other programs wrote: JSON and numbers from the store, the queue, HTTP and files.

A writer of a key or a message may have put anything into it. Every reader here is total: it returns
a value of the type that it names, or raises ValueError with the name of the field, the value and what was
expected. No other exception leaves it, whatever the bytes are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MAX_WHOLE = 2**63 - 1
"""The largest number that the store's own counters and leases have (a signed 64-bit integer)."""

_SHOWN_CHARACTERS = 60
_MAX_DIGITS = 19


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. ``NaN`` and ``Infinity``, which JSON does not have, are refused."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(document, dict):
        raise ValueError(f"it is {shown(document)}: expected a JSON object")
    return document


def whole_number(text: str) -> int | None:
    """The number that a decimal text says, from -2**63 to 2**63 - 1; None for any other text."""
    stripped = text.strip()  # also of control characters, at which int() stumbles
    digits = stripped.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
        return None
    number = int(stripped)
    return number if -MAX_WHOLE <= number <= MAX_WHOLE else None


def text_field(document: Mapping[str, Any], name: str, otherwise: str | None = None) -> str:
    """Return the text under ``name``; ``otherwise``, unless that is None, when the key is missing.

    Raises ValueError for any other value, as do all functions here that read a field.
    """
    value = document.get(name, otherwise)
    if not isinstance(value, str):
        raise _unexpected(name, value, "a text")
    return value


def whole_field(document: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    """Return the whole number from 0 to 2**63 - 1 under ``name``, as ``text_field`` does the text."""
    value = document.get(name, otherwise)
    if type(value) is not int or not 0 <= value <= MAX_WHOLE:
        raise _unexpected(name, value, "a whole number, at least 0")
    return value


def number_field(document: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    """Return the finite number under ``name``, as ``text_field`` does the text."""
    value = document.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _unexpected(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        raise _unexpected(name, value, "a number that fits a float") from None
    if not math.isfinite(number):
        raise _unexpected(name, value, "a finite number")
    return number


def flag_field(document: Mapping[str, Any], name: str, otherwise: bool | None = None) -> bool:
    """Return the truth value under ``name``, as ``text_field`` does the text."""
    value = document.get(name, otherwise)
    if not isinstance(value, bool):
        raise _unexpected(name, value, "true or false")
    return value


def object_field(
    document: Mapping[str, Any], name: str, otherwise: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the JSON object under ``name``, as ``text_field`` does the text."""
    value = document.get(name, otherwise)
    if not isinstance(value, dict):
        raise _unexpected(name, value, "a JSON object")
    return value


def whole_list_field(document: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the whole numbers in the list under ``name``; empty when the key is missing.

    Raises ValueError for any other value.
    """
    value = document.get(name, [])
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise _unexpected(name, value, "a list of whole numbers")
    return tuple(value)


def shown(value: object) -> str:
    """The value as a message shows it: at most 60 characters."""
    text = repr(value[:_SHOWN_CHARACTERS] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _unexpected(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"'{name}' is {shown(value)}: expected {expected}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it has {name}, which is not JSON")


def without_defaults(value: Any) -> Any:
    """Return a value made of dataclasses as plain data, without the fields that have their defaults."""
    if isinstance(value, tuple):
        return [without_defaults(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    held = {each.name: (getattr(value, each.name), _default(each)) for each in dataclasses.fields(value)}
    return {name: without_defaults(one) for name, (one, default) in held.items() if one != default}


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, or what is equal to no value."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def check_types(value: Any) -> None:
    """Raise TypeError for the first field, at any depth, whose value is not of its annotated type.

    A whole number counts as a number, a truth value as neither; whole numbers are those of 64 bits, and no
    number is NaN. Of a mapping only the kind is checked. Unions, tuples and ``Any`` are known.
    """
    kind: Any = type(value)
    for name, annotation in _fields_of(kind):
        held = getattr(value, name)
        if not _is_of_type(held, annotation):
            raise TypeError(f"{type(value).__name__}.{name} is {shown(held)}")


def _is_of_type(value: Any, annotation: Any) -> bool:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of_type(value, each) for each in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(kinds) == len(value) and all(map(_is_of_type, value, kinds))
    if origin is not None:
        return isinstance(value, origin)
    if dataclasses.is_dataclass(annotation):
        if not isinstance(value, typing.cast(type, annotation)):
            return False
        check_types(value)
        return True
    if annotation is int:
        return type(value) is int and abs(value) <= MAX_WHOLE
    if annotation is float:
        return _is_of_type(value, int) or (type(value) is float and not math.isnan(value))
    return annotation is Any or isinstance(value, annotation)


@lru_cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints: Mapping[str, Any] = typing.get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))
