"""Mistakes in YAML, told by the line that has them, with the nearest text that is right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    import yaml

EXAMPLE = "Write sections such as 'VllmWorker:' with indented 'key: value' lines."

MOST_CHARACTERS = 300
"""The characters of a line that are looked at and shown."""

ENTRY = re.compile(r"\s*(?P<key>[\w.-]+):\s+(?P<value>.*\S)\s*")
"""A line ``key: value``."""

WITHOUT_COLON = re.compile(r"\s*(?P<key>[\w.-]+)(?:\s+|:(?=\S))(?P<value>[^:#]*[^:#\s])\s*")
"""A line ``key value`` or ``key:value``, which YAML takes for a text."""


def not_yaml(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigError:
    """Return the error for the user: the line, what is wrong there, and what to write."""
    mark = error.problem_mark or error.context_mark
    problem = str(error.problem or error.context)
    if mark is None:
        return ConfigError(f"{source}: {problem}", hint=EXAMPLE)
    lines = [line[:MOST_CHARACTERS] for line in text.splitlines()]
    number, fault, hint = _found(problem, error, lines, mark.line)
    shown = lines[number].strip() if number < len(lines) else ""
    where = f"{source}, line {number + 1}" + (f": {shown!r}" if shown else "")
    return ConfigError(f"{where}: {fault}", hint=hint)


def _found(problem: str, error: yaml.MarkedYAMLError, lines: list[str], at: int) -> tuple[int, str, str]:
    """Return the line's number, counted from 0, the fault, and the hint."""
    line = lines[at] if at < len(lines) else ""
    begun = error.context_mark.line if error.context_mark else at
    if "'\\t'" in problem:
        return at, "a tab", "Indent with spaces: two for each level."
    if problem.startswith("mapping values are not allowed"):
        return _second_colon(lines, at)
    if "cannot start any token" in problem or "alias" in problem:
        return at, "a character that YAML keeps for itself", _quoted(line)
    if "end of stream" in problem or "stream end" in problem or "expected ','" in problem:
        return begun, "a quote or bracket that is not closed", "Close it at the end of its value."
    if "block end" in problem:
        return at, "at another depth than the keys before it", DEPTH
    if "another document" in problem:
        return at, "a second document", "A configuration is one document: remove the line ---."
    return at, problem, EXAMPLE


DEPTH = "The keys of a section begin in the same column, and those of a list with '- '."


def _second_colon(lines: list[str], at: int) -> tuple[int, str, str]:
    """Explain a colon where none may be: in a value, or because the line before has none."""
    entry = ENTRY.fullmatch(lines[at])
    if entry and ": " in f"{entry['value']} ":
        return at, "a second ': ' in one line", _quoted(lines[at])
    before = next((number for number in range(at - 1, -1, -1) if lines[number].strip()), at)
    if slip := WITHOUT_COLON.fullmatch(lines[before]):
        return before, "no ': ' after the key", f"Write `{slip['key']}: {slip['value']}`."
    return at, "at another depth than the keys before it", DEPTH


def _quoted(line: str) -> str:
    """Return the hint to put the value of the line in quotes."""
    entry = ENTRY.fullmatch(line)
    if entry is None:
        return "Put the text in quotes."
    value = entry["value"].replace("'", "''")
    return f"Put the value in quotes: `{entry['key']}: '{value}'`."
