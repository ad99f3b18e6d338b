"""Read a configuration's YAML, and say where it is wrong: the line, and the nearest text that is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dynaplan.config.other_files import recognise_file
from dynaplan.config.overrides import MODELS, Sections
from dynaplan.config.settings.fields import kebab
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    import yaml


MODELS_EXAMPLE = f"Write {MODELS}: {{NAME: {{model: /path/to/model.gguf}}}}, a key for each model."
EXAMPLE = "Write sections such as 'VllmWorker:' with indented 'key: value' lines."

MAX_SHOWN_CHARACTERS = 300
"""The characters of a line that are read and shown."""

ENTRY = re.compile(r"\s*(?P<key>[\w.-]+):\s+(?P<value>.*\S)\s*")
"""A line ``key: value``."""

WITHOUT_COLON = re.compile(r"\s*(?P<key>[\w.-]+)(?:\s+|:(?=\S))(?P<value>[^:#]*[^:#\s])\s*")
"""A line ``key value`` or ``key:value``, which YAML takes for a text."""


def yaml_error(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigError:
    """Return the error for the user: the line, what is wrong there, and what to write."""
    mark = error.problem_mark or error.context_mark
    problem = str(error.problem or error.context)
    if mark is None:
        return ConfigError(f"{source}: {problem}", hint=EXAMPLE)
    lines = [line[:MAX_SHOWN_CHARACTERS] for line in text.splitlines()]
    number, fault, hint = _diagnose(problem, error, lines, mark.line)
    shown = lines[number].strip() if number < len(lines) else ""
    where = f"{source}, line {number + 1}" + (f": {shown!r}" if shown else "")
    return ConfigError(f"{where}: {fault}", hint=hint)


def _diagnose(problem: str, error: yaml.MarkedYAMLError, lines: list[str], at: int) -> tuple[int, str, str]:
    """Return the line's number, counted from 0, the fault, and the hint."""
    line = lines[at] if at < len(lines) else ""
    begun = error.context_mark.line if error.context_mark else at
    if "'\\t'" in problem:
        return at, "a tab", "Indent with spaces: two for each level."
    if problem.startswith("mapping values are not allowed"):
        return _explain_colon(lines, at)
    if "cannot start any token" in problem or "alias" in problem:
        return at, "a character that YAML keeps for itself", _quote_hint(line)
    if "end of stream" in problem or "stream end" in problem or "expected ','" in problem:
        return begun, "a quote or bracket that is not closed", "Close it at the end of its value."
    if "block end" in problem:
        return at, "at another depth than the keys before it", INDENT_HINT
    if "another document" in problem:
        return at, "a second document", "A configuration is one document: remove the line ---."
    return at, problem, EXAMPLE


INDENT_HINT = "The keys of a section begin in the same column, and those of a list with '- '."


def _explain_colon(lines: list[str], at: int) -> tuple[int, str, str]:
    """Explain a colon where none may be: in a value, or because the line before has none."""
    entry = ENTRY.fullmatch(lines[at])
    if entry and ": " in f"{entry['value']} ":
        return at, "a second ': ' in one line", _quote_hint(lines[at])
    before = next((number for number in range(at - 1, -1, -1) if lines[number].strip()), at)
    if slip := WITHOUT_COLON.fullmatch(lines[before]):
        return before, "no ': ' after the key", f"Write `{slip['key']}: {slip['value']}`."
    return at, "at another depth than the keys before it", INDENT_HINT


def _quote_hint(line: str) -> str:
    entry = ENTRY.fullmatch(line)
    if entry is None:
        return "Put the text in quotes."
    value = entry["value"].replace("'", "''")
    return f"Put the value in quotes: `{entry['key']}: '{value}'`."


def read_sections_file(file: Path) -> Sections:
    """The sections of a YAML file; raises ConfigError, naming file and line, for anything else."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text: {error}", hint="Is it a YAML file? Save it as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="Check the path of -f.") from error
    return read_sections(text, str(file))


def read_sections(text: str, source: str) -> Sections:
    """The sections of YAML or JSON text; errors call it ``source``. A section without a body is empty.

    ``models`` is ``Models``.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check(node, source)
        sections = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise yaml_error(error, text, source) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {error}", hint=EXAMPLE) from error
    read = {name: body or {} for name, body in sections.items()}
    if MODELS not in read and MODELS.lower() in read:
        read[MODELS] = read.pop(MODELS.lower())
    return read


def _check(node: yaml.Node | None, source: str) -> None:
    """Raise ConfigError unless it is a mapping of mappings, every key text, none twice."""
    import yaml

    if node is None:
        raise ConfigError(f"{source} is empty", hint=EXAMPLE)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_at(source, node)}: not a mapping of services", hint=EXAMPLE)
    _refuse_other_tools(node, source)
    _check_keys(node, source)
    for key, body in node.value:
        if isinstance(body, yaml.MappingNode):
            _check_keys(body, source)
        elif body.tag != "tag:yaml.org,2002:null":
            hint = MODELS_EXAMPLE if key.value.lower() == MODELS.lower() else EXAMPLE
            raise ConfigError(f"{_at(source, body)}: {key.value} is not a mapping of options", hint=hint)


def _refuse_other_tools(node: yaml.MappingNode, source: str) -> None:
    import yaml

    bodies = {str(key.value): body for key, body in node.value}
    lists = {name for name, body in bodies.items() if isinstance(body, yaml.SequenceNode)}
    if found := recognise_file(bodies, lists):
        what, advice = found
        raise ConfigError(f"{source} is {what}", hint=advice)


def _check_keys(node: yaml.MappingNode, source: str) -> None:
    import yaml

    seen: dict[str, str] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.tag != "tag:yaml.org,2002:str":
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
            raise ConfigError(
                f"{_at(source, key)}: the key {shown} is not text", hint="Put the key in quotes."
            )
        if kebab(key.value) in seen:
            first = seen[kebab(key.value)]
            raise ConfigError(
                f"{_at(source, key)}: {key.value} is a second {first}", hint="Remove one of them."
            )
        seen[kebab(key.value)] = key.value
        if node is not value:
            _check_value(value, source)


def refuse_second_keys(node: yaml.MappingNode, source: str) -> None:
    """Raise ConfigError for a key of the mapping that stands there twice, letter by letter."""
    seen = set[str]()
    for key, _ in node.value:
        name = str(key.value)
        if name in seen and key.tag != "tag:yaml.org,2002:merge":
            raise ConfigError(f"{_at(source, key)}: {name} is a second {name}", hint="Remove one of them.")
        seen.add(name)


def _check_value(node: yaml.Node, source: str) -> None:
    """Raise ConfigError for a value that JSON cannot express, at any depth, such as a date."""
    import yaml

    kind = node.tag.rpartition(":")[2]
    if kind in ("timestamp", "binary", "set", "omap", "pairs"):
        shown = node.value if isinstance(node, yaml.ScalarNode) else "a collection"
        raise ConfigError(
            f"{_at(source, node)}: {shown} is a {kind} to YAML, which JSON has no word for",
            hint="Put the value in quotes.",
        )
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, source)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_value(each, source)


def _at(source: str, node: yaml.Node) -> str:
    return f"{source}, line {node.start_mark.line + 1}"
