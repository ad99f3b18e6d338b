"""Expressions for sets of models that may run together, as in llama-swap's matrix: ``(g | q) & v``, ``+llms &
e``.

::

    expression = term { "|" term }         alternatives
    term       = factor { "&" factor }     together
    factor     = "(" expression ")" | "+" name of another set | "+undefined" | name of a model

An expression stands for a list of sets: alternatives one after the other, and for ``&`` each set of the left
with each of the right. ``+undefined``, unless a set is called so, stands for each model that no expression
names, as alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from dynaplan.util.errors import ConfigError, nearest

MAX_SETS = 10_000
"""The most sets of one expression."""

_NAME = re.compile(r"(?<![\w.:/@+-])[\w.:/@-]+")
_TOKEN = re.compile(r"\s*(?:(?P<operator>[&|()])|(?P<name>\+?[\w.:/@-]+))")

_UNDEFINED = "undefined"

Sets = list[frozenset[str]]

Find = Callable[[str, str], str]
"""``find(name, where)`` returns the model of that name, empty where there is none."""


def expand(expressions: Mapping[str, str], find: Find, models: Iterable[str]) -> Sets:
    """Return the sets of all expressions, in their order, without the names that no model has.

    Raises ConfigError, naming the set.
    """
    named = {
        find(each, f"matrix.sets.{name}")
        for name, text in expressions.items()
        for each in _NAME.findall(str(text))
    }
    unnamed = [frozenset({each}) for each in models if each not in named]
    sets = [each for name in expressions for each in _SetReader(expressions, find, unnamed).sets_of(name, ())]
    return [each - {""} for each in sets]


class _SetReader:
    """Reads one expression, and those that it refers to; ``unnamed`` are the sets of ``+undefined``."""

    def __init__(self, expressions: Mapping[str, str], find: Find, unnamed: Sets) -> None:
        self._expressions, self._find, self._unnamed = expressions, find, unnamed
        self._set, self._tokens, self._above = "", list[str](), tuple[str, ...]()

    def sets_of(self, name: str, above: tuple[str, ...]) -> Sets:
        """Return the sets of the expression of that name; ``above`` are those that refer to it."""
        if name in above:
            raise ConfigError(f"matrix.sets.{name} refers to itself", hint=" -> ".join((*above, name)))
        text = self._expressions[name]
        self._set, self._above = name, (*above, name)
        self._tokens = self._split(str(text))
        found = self._alternatives()
        if self._tokens:
            raise self._error(f"{self._tokens[0]!r} is one too many")
        return found

    def _split(self, text: str) -> list[str]:
        tokens, position = [], 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"{text[position:].strip()[0]!r} has no meaning")
            tokens.append(match["operator"] or match["name"])
            position = match.end()
        return tokens

    def _alternatives(self) -> Sets:
        found = self._together()
        while self._tokens[:1] == ["|"]:
            self._tokens.pop(0)
            found = found + self._together()
        return found

    def _together(self) -> Sets:
        found = self._factor()
        while self._tokens[:1] == ["&"]:
            self._tokens.pop(0)
            others = self._factor()
            if len(found) * len(others) > MAX_SETS:
                raise self._error(f"more than {MAX_SETS} sets")
            found = [each | other for each in found for other in others]
        return found

    def _factor(self) -> Sets:
        token = self._tokens.pop(0) if self._tokens else ""
        if token == "(":
            found = self._alternatives()
            if self._tokens[:1] != [")"]:
                raise self._error("a parenthesis is not closed")
            self._tokens.pop(0)
            return found
        if token.startswith("+"):
            other = token[1:]
            if other == _UNDEFINED and other not in self._expressions:
                return self._unnamed or [frozenset()]
            if other not in self._expressions:
                raise self._error(f"no set is called {other!r}", nearest(other, self._expressions))
            return _SetReader(self._expressions, self._find, self._unnamed).sets_of(other, self._above)
        if not token or token in "&|)":
            raise self._error(
                f"a model is missing before {token!r}" if token else "a model is missing at the end"
            )
        return [frozenset({self._find(token, f"matrix.sets.{self._set}")})]

    def _error(self, problem: str, hint: str = "") -> ConfigError:
        text = self._expressions[self._set]
        return ConfigError(
            f"matrix.sets.{self._set} = {text!r}: {problem}",
            hint=hint or "Expected names of models with & (together), | (or), parentheses, and +SET.",
        )
