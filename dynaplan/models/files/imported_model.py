"""What another tool's file says, in our terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.models.model import Constraints

IF_UNSET = "?"
"""The end of a parameter's name that is set only where the request has none: ``top_k?``."""


@dataclass(frozen=True)
class MatchRule:
    """Parameters for requests in which the field ``key`` has the value ``match``, as JSON writes it."""

    key: str
    match: str
    set: Mapping[str, Any]

    def applies_to(self, request: Mapping[str, Any]) -> bool:
        if self.key not in request:
            return False
        value = request[self.key]
        return (value if isinstance(value, str) else json.dumps(value)) == self.match


@dataclass(frozen=True)
class RequestFilters:
    """What is changed in a model's requests: fields are removed, then set.

    They are set by rules, then for all requests, then by the name that was asked for. A mapping that a rule
    sets is merged into that of the request.
    """

    removed: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    set_by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    set_by_match: tuple[MatchRule, ...] = ()

    def apply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request's document as the model gets it. Its ``model`` stays."""
        name = request.get("model")
        changed = {key: value for key, value in request.items() if key not in self.removed}
        for rule in self.set_by_match:
            if rule.applies_to(changed):
                changed = _with(
                    changed, {key: _merged(changed.get(key), each) for key, each in rule.set.items()}
                )
        changed = _with(changed, self.set)
        changed = _with(changed, self.set_by_name.get(name, {}) if isinstance(name, str) else {})
        return {**changed, "model": name} if name is not None else changed

    def set_in(self, document: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of the fields whose values in a changed request the filters have set."""
        rules = (rule.set for rule in self.set_by_match)
        said = (
            (key, value)
            for each in (self.set, *self.set_by_name.values(), *rules)
            for key, value in each.items()
        )
        return frozenset(
            name for key, value in said if document.get(name := key.removesuffix(IF_UNSET)) == value
        )


def _with(request: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with the parameters; of both spellings of one, the one without ``?`` holds."""
    forced = {key: value for key, value in parameters.items() if not key.endswith(IF_UNSET)}
    others = {
        key.removesuffix(IF_UNSET): value for key, value in parameters.items() if key.endswith(IF_UNSET)
    }
    return {**others, **request, **forced}


def _merged(before: Any, value: Any) -> Any:
    return {**before, **value} if isinstance(before, Mapping) and isinstance(value, Mapping) else value


@dataclass(frozen=True)
class ImportedModel:
    """One model of the file.

    - ``options``: its entry below ``Models:``, in kebab-case
    - ``url``: where its command listens, if not on ``${PORT}`` of the loopback address; may end in a path
    - ``stop_command``: what ends it, with ``${PID}``; empty for SIGTERM
    - ``upstream_name``: the name by which its command knows the model; empty for its own
    - ``is_unlisted``: clients may ask for it, but it is not in ``/v1/models``
    """

    options: Mapping[str, Any]
    url: str = ""
    stop_command: str = ""
    upstream_name: str = ""
    is_unlisted: bool = False
    filters: RequestFilters = field(default_factory=RequestFilters)


@dataclass(frozen=True)
class ImportedFile:
    """All models of the file by name; ``notes`` has a line for everything that has no meaning here."""

    tool: str
    models: Mapping[str, ImportedModel]
    constraints: Constraints = field(default_factory=Constraints)
    preload: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
