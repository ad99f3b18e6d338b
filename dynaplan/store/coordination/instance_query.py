"""The queries of discovery: all instances, those of a namespace, of a component, or of an endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.store.coordination.prefix_watcher import PrefixWatcher, full_key_string
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from dynaplan.store.model import KeyValue
from dynaplan.store.port import KeyValueStore
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class InstanceQuery:
    """Which instances: an empty name means all, and all that would follow it are empty too.

    Raises ConfigError for a name behind an empty one, and for a name with ``/`` in it, unless it is the
    endpoint's.
    """

    namespace: str = ""
    component: str = ""
    endpoint: str = ""

    def __post_init__(self) -> None:
        names = self.namespace, self.component, self.endpoint
        given = [name for name in names if name]
        if list(names[: len(given)]) != given or any("/" in name for name in names[:2]):
            raise ConfigError(
                f"no query of instances: {names}",
                hint="Give a namespace, a namespace and a component, or these and an endpoint.",
            )

    @property
    def prefix(self) -> str:
        """The prefix of the registrations' keys."""
        names = (name for name in (self.namespace, self.component, self.endpoint) if name)
        return SERVICES_PREFIX + "".join(f"{name}/" for name in names)

    async def find(self, store: KeyValueStore) -> tuple[Instance, ...]:
        """Return the instances that are registered now, in key order; unreadable ones are left out.

        Also the ones that are not reached over HTTP: ``url`` is empty then. Raises StoreUnavailable when the
        store does not answer.
        """
        found = []
        for item in await store.list(self.prefix):
            try:
                found.append(_instance(item))
            except ValueError:
                continue  # `dynaplan status` names it
        return tuple(found)

    def watcher(self, store: KeyValueStore) -> PrefixWatcher[str, Instance]:
        """Return a watcher of the instances by their keys, which is not started yet."""
        return PrefixWatcher(store, self.prefix, full_key_string, _instance)


def _instance(item: KeyValue) -> Instance:
    return Instance.from_json(item.value)
