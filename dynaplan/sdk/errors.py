"""What is wrong with how a graph is written; each is also the built-in error that its author expects."""

from __future__ import annotations

from collections.abc import Iterable

from dynaplan.domain.errors import GraphError


class LinkError(GraphError, ValueError):
    """``link()`` was asked for an edge that the services' dependencies do not allow."""


class InterfaceError(GraphError, TypeError):
    """A service does not implement its interface, or a decorator was given something it cannot use."""


class UnboundDependency(GraphError, AttributeError):
    """A dependency of an instance was used, but no client was bound to it: it is not linked."""


def nearest(name: str, names: Iterable[str]) -> str:
    """``did you mean X?`` when one of the names is near, else a list of them; the text of a hint."""
    from difflib import get_close_matches

    known = sorted(set(names))
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), by_lower, 1, cutoff=0.6)
    if near:
        return f"did you mean {by_lower[near[0]]!r}?"
    return f"known: {', '.join(known)}" if known else ""
