"""Read a configuration's YAML, and say where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config.settings.fields import kebab
from dynaplan.config.yaml_mistakes import EXAMPLE, not_yaml
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    import yaml

Sections = dict[str, dict[str, Any]]


def read_sections_file(file: Path) -> Sections:
    """The sections of a YAML file; raises ConfigError, naming file and line, for anything else."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}", hint="Is it a YAML file?") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="Check the path of -f.") from error
    return read_sections(text, str(file))


def read_sections(text: str, source: str) -> Sections:
    """The sections of YAML or JSON text; errors call it ``source``. A section without a body is empty."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check(node, source)
        sections = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise not_yaml(error, text, source) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {error}", hint=EXAMPLE) from error
    return {name: body or {} for name, body in sections.items()}


def _check(node: yaml.Node | None, source: str) -> None:
    """A mapping of mappings, every key text, none twice."""
    import yaml

    if node is None:
        raise ConfigError(f"{source} is empty", hint=EXAMPLE)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_at(source, node)}: not a mapping of services", hint=EXAMPLE)
    _check_keys(node, source)
    for key, body in node.value:
        if isinstance(body, yaml.MappingNode):
            _check_keys(body, source)
        elif body.tag != "tag:yaml.org,2002:null":
            raise ConfigError(f"{_at(source, body)}: {key.value} is not a mapping of options", hint=EXAMPLE)


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


def _check_value(node: yaml.Node, source: str) -> None:
    """Refuse what no process can be told in JSON, at any depth: a date, for one."""
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
