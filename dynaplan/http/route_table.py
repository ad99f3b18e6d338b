"""How a server finds the route of a request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from dynaplan.http.routes import Route


class RouteTable:
    """The routes of one server; those without fields are found first, then the first that was added."""

    def __init__(self) -> None:
        self._plain: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], Route]] = []

    @property
    def paths(self) -> set[str]:
        return {*self._plain, *(route.path for _, route in self._patterns)}

    def add(self, routes: Iterable[Route]) -> None:
        for route in routes:
            if "{" in route.path or "*" in route.path:
                self._patterns.append((_pattern(route.path), route))
            else:
                self._plain.setdefault(route.path, {})[route.method] = route

    def find(self, path: str, target: str) -> dict[str, tuple[Route, dict[str, str]]]:
        """Return, by method, the routes at this path and the fields in it; none where nothing is served.

        Fields may contain slashes: they are cut out of the ``target``, whose escapes are not decoded yet.
        """
        raw_path = target.partition("?")[0] if target.startswith("/") else path
        found: dict[str, tuple[Route, dict[str, str]]] = {
            method: (route, {}) for method, route in self._plain.get(path, {}).items()
        }
        for pattern, route in () if found else self._patterns:
            if match := pattern.fullmatch(raw_path):
                fields = {name: unquote(value) for name, value in match.groupdict().items()}
                found.setdefault(route.method, (route, fields))
        return found


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with fields or ``*``."""
    parts = re.split(r"(\{\w+\}|\*)", path)
    named = [f"(?P<{part[1:-1]}>[^/]+)" if part[:1] == "{" else re.escape(part) for part in parts]
    return re.compile("".join(named).replace(r"\*", ".*"))
