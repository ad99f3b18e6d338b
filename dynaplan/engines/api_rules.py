"""The part of an engine's API that a frontend must know: fields of requests with bounds, signs of a death.

Each engine's module has its own as data: a list of what is refused or bounded, because the engine was seen
to end or to stand still over it. Every other field is the engine's own affair: it reads, refuses or ignores
it, as it does without a frontend before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.util.documents import shown

REPETITIONS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains"}
)
"""Keys of a JSON schema whose number is a number of repetitions in the grammar that engines make of it."""


TOOL_FIELDS = frozenset({"tools", "functions"})
"""The fields with tools, whose schemas are those of a client's program."""

MAX_REPETITIONS = 5_000
"""The largest number of repetitions of a tool's schema that an engine gets."""


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
class ErrorRule:
    """An error of an engine that is answered otherwise: one with ``mark`` in its message, by ``status``.

    ``advice`` stands in for the engine's own message, unless it is empty; ``code`` is OpenAI's.
    """

    mark: str
    status: int = 400
    advice: str = ""
    code: str = "invalid_field"


@dataclass(frozen=True)
class EngineApi:
    """One engine's API as a frontend sees it.

    ``fields`` are rules by the field's name, ``paths`` those of other paths than completions and chats; any
    other field and path is the engine's own affair. ``streams_lists``: the answers to a list of prompts can
    be a stream. An answer of status 500 or an error event with one of the ``death_marks`` in its message
    means that the engine is dead behind its living server. ``continuation`` are the fields by which a
    chat's last message, one of the assistant's, is taken for the beginning of the answer; None where the
    engine cannot continue an answer. ``errors`` are answers of status 5xx that are no fault of the engine,
    or give another program's advice. ``is_unknown``: it is any program, whose answers are passed on as they
    come: with any status, in any form, and with any end of a stream. Only a connection that breaks is a
    death then.
    """

    fields: Mapping[str, FieldRule] = field(default_factory=dict)
    death_marks: tuple[str, ...] = ()
    continuation: Mapping[str, Any] | None = None
    paths: Mapping[str, Mapping[str, FieldRule]] = field(default_factory=dict)
    streams_lists: bool = True
    errors: tuple[ErrorRule, ...] = ()
    is_unknown: bool = False

    def fault(self, document: Mapping[str, Any], path: str = "") -> FieldFault | None:
        """Return a fault of a request's fields; None when they are as the engine takes them."""
        rules = self.paths.get(path, self.fields)
        for name in rules.keys() & document.keys():
            value, rule = document[name], rules[name]
            if value is not None and not rule.accepts(value):
                return FieldFault(name, f"{name!r} is {shown(value)}: expected {rule.expected}.")
        return None

    def loosened_tools(self, document: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """Return the fields with tools whose schemas are beyond a bound, without their large repetitions.

        Those would make a grammar slow, and are no more than hints to a model. Other fields are left out.
        """
        rules = self.paths.get(path, self.fields)
        names = TOOL_FIELDS & document.keys() & rules.keys()
        beyond = [name for name in names if not rules[name].accepts(document[name])]
        return {name: without_large_repetitions(document[name]) for name in beyond}

    def find_error(self, message: str) -> ErrorRule | None:
        """Return the rule for an engine's error with that message; None where it is answered as it is."""
        return next((rule for rule in self.errors if rule.mark in message), None)

    def reports_death(self, message: str) -> bool:
        return any(mark in message for mark in self.death_marks)


def forbidden(why: str) -> FieldRule:
    """Make the rule for a field that no request may have; ``why`` ends the refusal's sentence."""
    return FieldRule(f"no such field: {why}", lambda value: False)


def boolean() -> FieldRule:
    return FieldRule("true or false", lambda value: isinstance(value, bool))


def integer(minimum: int, maximum: int) -> FieldRule:
    return FieldRule(
        f"a whole number from {minimum} to {maximum}",
        lambda value: type(value) is int and minimum <= value <= maximum,
    )


def number(minimum: float, maximum: float) -> FieldRule:
    return FieldRule(
        f"a number from {minimum:g} to {maximum:g}", lambda value: _is_within(value, minimum, maximum)
    )


def integer_or_boolean(minimum: int, maximum: int) -> FieldRule:
    rule = integer(minimum, maximum)
    return FieldRule(
        f"{rule.expected}, or true or false",
        lambda value: isinstance(value, bool) or rule.accepts(value),
    )


def string(max_length: int) -> FieldRule:
    return FieldRule(
        f"a text of at most {max_length} characters",
        lambda value: isinstance(value, str) and len(value) <= max_length,
    )


def strings(maximum: int, max_length: int) -> FieldRule:
    one = string(max_length)
    return FieldRule(
        f"a text, or at most {maximum} texts, of at most {max_length} characters each",
        lambda value: (
            one.accepts(value)
            or (isinstance(value, list) and len(value) <= maximum and all(map(one.accepts, value)))
        ),
    )


def integers(maximum: int) -> FieldRule:
    """Make the rule for a list of at most ``maximum`` whole numbers from 0 on that fit 31 bits."""
    return FieldRule(
        f"a list of at most {maximum} whole numbers",
        lambda value: isinstance(value, list) and len(value) <= maximum and all(map(_is_integer, value)),
    )


def collection(maximum: int) -> FieldRule:
    return FieldRule(
        f"a list or an object of at most {maximum} entries",
        lambda value: isinstance(value, list | dict) and len(value) <= maximum,
    )


def biases(maximum: int, limit: float) -> FieldRule:
    """Make the rule for biases of tokens, from ``-limit`` to ``limit``, at most ``maximum`` of them.

    They are an object, or llama.cpp's list of pairs, in which false forbids a token.
    """
    bias = number(-limit, limit)

    def accepts(value: Any) -> bool:
        if isinstance(value, dict):
            return len(value) <= maximum and all(map(bias.accepts, value.values()))
        return (
            isinstance(value, list)
            and len(value) <= maximum
            and all(isinstance(each, list) and len(each) == 2 for each in value)
            and all(each[1] is False or bias.accepts(each[1]) for each in value)
        )

    return FieldRule(f"an object of at most {maximum} tokens, each with {bias.expected}", accepts)


def grammar(max_length: int, max_depth: int) -> FieldRule:
    return FieldRule(
        f"a text of at most {max_length} characters, with parentheses at most {max_depth} deep",
        lambda value: isinstance(value, str) and len(value) <= max_length and _depth_of(value) <= max_depth,
    )


def schema(max_depth: int, max_values: int, max_repetitions: int) -> FieldRule:
    """Make the rule for JSON that is or holds a JSON schema, of which an engine makes a grammar."""
    return FieldRule(
        f"JSON nested at most {max_depth} deep, with at most {max_values} values and at most"
        f" {max_repetitions} for {', '.join(sorted(REPETITIONS))}",
        lambda value: _is_small(value, max_depth, max_values, max_repetitions),
    )


def without_large_repetitions(value: Any, depth: int = 64) -> Any:
    """Return JSON without the numbers of repetitions above ``MAX_REPETITIONS``, down to ``depth`` levels."""
    if not depth:
        return value
    if isinstance(value, dict):
        return {
            name: without_large_repetitions(each, depth - 1)
            for name, each in value.items()
            if not (name in REPETITIONS and _is_above(each, MAX_REPETITIONS))
        }
    return (
        [without_large_repetitions(each, depth - 1) for each in value] if isinstance(value, list) else value
    )


def _is_within(value: Any, minimum: float, maximum: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum


def _is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _depth_of(text: str) -> int:
    """Return the deepest nesting of parentheses, those in quotes included."""
    depth = deepest = 0
    for character in text:
        if character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == ")":
            depth -= 1
    return deepest


def _is_small(value: Any, max_depth: int, max_values: int, max_repetitions: int) -> bool:
    level, values = [value], 0
    for _ in range(max_depth + 1):
        values += len(level)
        if values > max_values:
            return False
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                if any(_is_above(each.get(name), max_repetitions) for name in REPETITIONS & each.keys()):
                    return False
                deeper += each.values()
            elif isinstance(each, list):
                deeper += each
        if not deeper:
            return True
        level = deeper
    return False


def _is_above(value: Any, maximum: int) -> bool:
    return isinstance(value, int | float) and not value <= maximum


MAX_ANSWERS = 128
"""OpenAI's own limit of ``n``."""

MAX_LOGPROBS = 100
"""Alternatives per token; OpenAI has 20."""

SCHEMA = schema(max_depth=64, max_values=5_000, max_repetitions=5_000)
"""llama.cpp took 7 s for ``maxItems: 100000`` and 18 s for 5000 properties (2026.10)."""

TOOLS = schema(max_depth=64, max_values=50_000, max_repetitions=MAX_REPETITIONS)
"""The schemas of all tools together; an agent has dozens."""

BOUNDED_FIELDS: Mapping[str, FieldRule] = {
    "n": integer(1, MAX_ANSWERS),
    "best_of": integer(1, MAX_ANSWERS),
    "logprobs": integer_or_boolean(0, MAX_LOGPROBS),
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "stop": strings(64, 4096),
    "logit_bias": biases(4096, 10_000),
    "response_format": SCHEMA,
    "tools": TOOLS,
    "functions": TOOLS,
}
"""Bounds for every engine. SGLang ends for ``top_logprobs`` above its vocabulary (sgl-project/sglang#40076),
and takes 22 GB for ``n: 5000000`` (sgl-project/sglang#36856)."""

ANSWER_SCHEMAS: Mapping[str, FieldRule] = {"text": SCHEMA, "output_config": SCHEMA}
"""The fields of ``/v1/responses`` and ``/v1/messages`` that hold the schema of an answer."""
