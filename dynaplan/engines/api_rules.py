"""The part of an engine's API that a frontend must know: fields of requests with bounds, signs of a death.

Each engine declares its own as data (``engine_apis.py``). A field that is not bounded may cost an
engine its life or its other requests their time; see the lists for what was seen to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.util.documents import shown
from dynaplan.util.errors import nearest

REPETITIONS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains"}
)
"""Keys of a JSON schema whose number is a number of repetitions in the grammar that engines make of it."""


@dataclass(frozen=True)
class FieldRule:
    """The values that a field may have: ``expected`` in words, ``accepts`` as a test. None is accepted."""

    expected: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class FieldFault:
    """A field that a request may not have, or not with that value; the message says what was expected."""

    name: str
    message: str


@dataclass(frozen=True)
class EngineApi:
    """One engine's API as a frontend sees it.

    ``fields`` are rules by the field's name. ``is_complete``: the engine takes no other field, and besides
    completions and chats only ``paths``, each with all of its fields. ``streams_lists``: the answers to a
    list of prompts can be a stream. An answer of
    status 500 or an error event with one of the ``death_marks`` in its message means that the engine is dead
    behind its living server. ``continuation`` are the fields by which a chat's last message, one of the
    assistant's, is taken for the beginning of the answer; None where the engine cannot continue an answer.
    """

    fields: Mapping[str, FieldRule] = field(default_factory=dict)
    is_complete: bool = False
    death_marks: tuple[str, ...] = ()
    continuation: Mapping[str, Any] | None = None
    paths: Mapping[str, Mapping[str, FieldRule]] = field(default_factory=dict)
    streams_lists: bool = True

    def fault(self, document: Mapping[str, Any], path: str = "") -> FieldFault | None:
        """Return the first fault of a request's fields; None when they are as the engine takes them."""
        rules = self.paths.get(path, self.fields)
        names = document if self.is_complete else rules.keys() & document.keys()
        for name in names:
            value, rule = document[name], rules.get(name)
            if rule is None:
                hint = nearest(name, rules, cutoff=0.75)
                hint = f" {hint}" if hint.startswith("Did") else " Leave it out."
                return FieldFault(name, f"{name!r} is {shown(value)}: this engine has no such field.{hint}")
            if value is not None and not rule.accepts(value):
                return FieldFault(name, f"{name!r} is {shown(value)}: expected {rule.expected}.")
        return None

    def tells_death(self, message: str) -> bool:
        """Tell whether an error's message means that the engine is dead."""
        return any(mark in message for mark in self.death_marks)


def anything() -> FieldRule:
    """Any value: the engine ignores the field, or checks it."""
    return FieldRule("anything", lambda value: True)


def refused(why: str) -> FieldRule:
    """Make the rule of a field that takes no value; ``why`` ends the refusal's sentence."""
    return FieldRule(f"no such field: {why}", lambda value: False)


def flag() -> FieldRule:
    """Make the rule of a field that takes true or false."""
    return FieldRule("true or false", lambda value: isinstance(value, bool))


def whole(least: int, most: int) -> FieldRule:
    """A whole number within the bounds."""
    return FieldRule(
        f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most
    )


def number(least: float, most: float) -> FieldRule:
    """Make the rule of a field that takes a number from ``least`` to ``most``, both included."""
    return FieldRule(f"a number from {least:g} to {most:g}", lambda value: _is_within(value, least, most))


def whole_or_flag(least: int, most: int) -> FieldRule:
    """A whole number within the bounds, or true or false."""
    rule = whole(least, most)
    return FieldRule(
        f"{rule.expected}, or true or false",
        lambda value: isinstance(value, bool) or rule.accepts(value),
    )


def text(most_characters: int) -> FieldRule:
    """A text of at most that length."""
    return FieldRule(
        f"a text of at most {most_characters} characters",
        lambda value: isinstance(value, str) and len(value) <= most_characters,
    )


def texts(most: int, most_characters: int) -> FieldRule:
    """A text, or a list of texts, with bounds on their number and length."""
    one = text(most_characters)
    return FieldRule(
        f"a text, or at most {most} texts, of at most {most_characters} characters each",
        lambda value: (
            one.accepts(value)
            or (isinstance(value, list) and len(value) <= most and all(map(one.accepts, value)))
        ),
    )


def wholes(most: int) -> FieldRule:
    """A list of whole numbers that fit 31 bits."""
    return FieldRule(
        f"a list of at most {most} whole numbers",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(_is_whole, value)),
    )


def entries(most: int) -> FieldRule:
    """A list or an object with at most that number of entries."""
    return FieldRule(
        f"a list or an object of at most {most} entries",
        lambda value: isinstance(value, list | dict) and len(value) <= most,
    )


def grammar(most_characters: int, most_depth: int) -> FieldRule:
    """A grammar as text, its parentheses nested at most that deep."""
    return FieldRule(
        f"a text of at most {most_characters} characters, with parentheses at most {most_depth} deep",
        lambda value: (
            isinstance(value, str) and len(value) <= most_characters and _depth_of(value) <= most_depth
        ),
    )


def schema(most_depth: int, most_values: int, most_repetitions: int) -> FieldRule:
    """JSON that is or holds a JSON schema, of which an engine makes a grammar."""
    return FieldRule(
        f"JSON nested at most {most_depth} deep, with at most {most_values} values and at most"
        f" {most_repetitions} for {', '.join(sorted(REPETITIONS))}",
        lambda value: _is_small(value, most_depth, most_values, most_repetitions),
    )


def _is_within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _depth_of(text: str) -> int:
    """The deepest nesting of opening parentheses, whether in quotes or not."""
    depth = deepest = 0
    for character in text:
        if character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == ")":
            depth -= 1
    return deepest


def _is_small(value: Any, most_depth: int, most_values: int, most_repetitions: int) -> bool:
    level, values = [value], 0
    for _ in range(most_depth + 1):
        values += len(level)
        if values > most_values:
            return False
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                if any(_is_above(each.get(name), most_repetitions) for name in REPETITIONS & each.keys()):
                    return False
                deeper += each.values()
            elif isinstance(each, list):
                deeper += each
        if not deeper:
            return True
        level = deeper
    return False


def _is_above(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and not value <= most
