"""Parts of dynaplan, or of somebody else's package, that are found by a name: Python's entry points.

A package adds one in its ``setup.cfg`` or ``pyproject.toml``; the groups are ``dynaplan.stores``,
``dynaplan.connectors`` and ``dynaplan.engines``. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the group's entry of that name, not imported; None where no installed package has it."""
    from importlib.metadata import entry_points  # much, for the built-in parts that most have alone

    return next(iter(entry_points(group=group, name=name)), None)


def load_entry_point(group: str, name: str) -> Any:
    """Import what the group has under that name; raises ConfigError where no installed package has it."""
    found = find_entry_point(group, name)
    if found is None:
        raise ConfigError(
            f"no installed package has {name!r} among its {group}",
            hint="Install the package again (`pip install -e .`): its list of entry points is older than it.",
        )
    return found.load()
