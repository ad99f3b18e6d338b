"""Check that dataclasses which were made of a file's JSON hold what their annotations say."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dynaplan.util.documents import LARGEST_WHOLE, shown


def check_types(value: Any) -> None:
    """Raise TypeError for the first field, at any depth, whose value is not of its annotated type.

    A whole number counts as a number, a truth value as neither; whole numbers are those of 64 bits, and no
    number is NaN. Of a mapping only the kind is looked at. Unions, tuples and ``Any`` are known.
    """
    kind: Any = type(value)
    for name, annotation in _fields_of(kind):
        held = getattr(value, name)
        if not _fits(held, annotation):
            raise TypeError(f"{type(value).__name__}.{name} is {shown(held)}")


def _fits(value: Any, annotation: Any) -> bool:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, each) for each in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if origin is not None:
        return isinstance(value, origin)
    if dataclasses.is_dataclass(annotation):
        if not isinstance(value, typing.cast(type, annotation)):
            return False
        check_types(value)
        return True
    if annotation is int:
        return type(value) is int and abs(value) <= LARGEST_WHOLE
    if annotation is float:
        return _fits(value, int) or (type(value) is float and not math.isnan(value))
    return annotation is Any or isinstance(value, annotation)


@lru_cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a dataclass with their annotations."""
    hints: Mapping[str, Any] = typing.get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))
