"""The options a service knows, so that a misspelt or ill-typed one is found before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """The type of an option's value; the value says it in words."""

    TEXT = "text"
    INTEGER = "a whole number"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    MAPPING = "a mapping, or its JSON text"
    LIST = "a list"
    ANY = "anything"


@dataclass(frozen=True)
class Option:
    """One option: its type, what it is for, its least value, and the only values when there are any.

    ``engine`` is the only engine that has it; empty for one that several have, or that is no engine's.
    """

    kind: Kind
    about: str = ""
    least: float | None = None
    choices: tuple[str, ...] = ()
    engine: str = ""

    def expected(self) -> str:
        """What the value must be, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return self.kind.value if self.least is None else f"{self.kind.value}, {self.least:g} or more"

    def accepts(self, value: Any) -> bool:
        """Whether the value has the right type and is not too low. None means "not set" and is right."""
        if value is None:
            return True
        if self.choices:
            return value in self.choices
        return _FITS[self.kind](value) and (self.least is None or value >= self.least)


Options = Mapping[str, Option]
"""Name in kebab-case -> option."""


def kebab(name: str) -> str:
    """The spelling in which option names are compared; ``max_model_len`` is ``max-model-len``."""
    return name.replace("_", "-")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


_FITS: Mapping[Kind, Callable[[Any], bool]] = {
    Kind.TEXT: lambda value: isinstance(value, str),
    Kind.INTEGER: lambda value: isinstance(value, int) and not isinstance(value, bool),
    Kind.NUMBER: _is_number,
    Kind.BOOLEAN: lambda value: isinstance(value, bool),
    Kind.MAPPING: lambda value: isinstance(value, dict) or str(value).lstrip().startswith("{"),
    Kind.LIST: lambda value: isinstance(value, list | str),
    Kind.ANY: lambda value: True,
}
