"""Templates of manifests, in ``data/kubernetes/``, and how they are filled in (its ``README.md``).

A manifest is parsed first, and values are put into the parsed fields: whatever a value contains, it stays the
text of one field. No value is read as a template again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Document = dict[str, Any]
"""One Kubernetes manifest as plain data."""

DIRECTORY = Path(__file__).parents[1] / "data" / "kubernetes"

PLACE = re.compile(r"\$\{(\w+)\}")
"""The place of a value: ``${name}``."""

CONDITION = "$if"
"""The key of a mapping that is left out where the value is false or empty."""


def read_template(name: str) -> str:
    return (DIRECTORY / name).read_text(encoding="utf-8")


def documents(name: str, values: Mapping[str, Any]) -> list[Document]:
    """Return the manifests of a template, filled in."""
    import yaml

    filled = (fill(each, values) for each in yaml.safe_load_all(read_template(name)))
    return [each for each in filled if each is not None]


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """Return a parsed template with the values in their places; None for a part that is left out.

    Raises KeyError for a place without a value; a value of None leaves the field out.
    """
    match template:
        case str():
            whole = PLACE.fullmatch(template)
            return values[whole[1]] if whole else PLACE.sub(lambda place: str(values[place[1]]), template)
        case list():
            return [item for part in template for item in _items(part, values)]
        case dict():
            if not fill(template.get(CONDITION, True), values):
                return None
            fields = {key: fill(part, values) for key, part in template.items() if key != CONDITION}
            kept = {key: value for key, value in fields.items() if value is not None}
            return kept if kept or not template else None
    return template


def _items(part: Any, values: Mapping[str, Any]) -> list[Any]:
    """Return what replaces one item of a template's list: the items of its value if that is a list itself.

    None of them where the item is left out.
    """
    filled = fill(part, values)
    if isinstance(part, str) and isinstance(filled, (list, tuple)):
        return list(filled)
    return [] if filled is None else [filled]
