"""The edges that a module states with ``A.link(B)``, kept in that module.

There is no list of edges for the whole process: two graph modules that link the same services, each in its
own way, must not see each other's edges. So an edge belongs to the module whose code calls ``link()``, and
is kept in that module's own globals. It vanishes with the module; a reloaded module, or another module of
the same name, begins with none. docs/decisions/0009 gives the reasons.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaplan.graph.service import Service

GLOBAL_NAME = "__dynaplan_links__"

Edges = dict[tuple["Service[Any]", str], "Service[Any]"]
"""(source, attribute of the dependency) -> target."""


@dataclass
class _Links:
    """The edges of one run of a module; ``spec`` identifies the run, because every import makes its own."""

    spec: object
    edges: Edges = field(default_factory=dict)


def record(
    module_globals: dict[str, Any], source: Service[Any], attribute: str, target: Service[Any]
) -> None:
    """Write an edge into the module with these globals, in place of an earlier one for the attribute."""
    spec = module_globals.get("__spec__")
    links = module_globals.get(GLOBAL_NAME)
    if not isinstance(links, _Links) or links.spec is not spec:
        links = module_globals[GLOBAL_NAME] = _Links(spec)
    links.edges[source, attribute] = target


def stated_in(module_name: str) -> Edges:
    """Return the edges that an imported module states."""
    links = getattr(sys.modules.get(module_name), GLOBAL_NAME, None)
    return dict(links.edges) if isinstance(links, _Links) else {}
