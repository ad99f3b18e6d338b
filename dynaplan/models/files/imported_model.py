"""What another tool's file says, in our terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.models.model import Constraints


@dataclass(frozen=True)
class RequestFilters:
    """What is changed in a model's requests: removed parameters, and set ones, for all or by the asked
    name."""

    removed: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    set_by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def apply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request's document as the model gets it. Its ``model`` stays."""
        name = request.get("model")
        kept = {key: value for key, value in request.items() if key not in self.removed}
        by_name = self.set_by_name.get(name, {}) if isinstance(name, str) else {}
        changed = {**kept, **self.set, **by_name}
        return {**changed, "model": name} if name is not None else changed


@dataclass(frozen=True)
class ImportedModel:
    """One model of the file.

    - ``options``: its entry below ``Models:``, in kebab-case; with ``command`` where no engine was recognised
    - ``url``: where its command listens, if not on ``${PORT}`` of the loopback address
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
