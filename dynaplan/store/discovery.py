"""Discovery: the instances that are registered, by a watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynaplan.store.instances import SERVICES_PREFIX, Instance, not_callable
from dynaplan.store.model import KeyValue
from dynaplan.store.port import KeyValueStore
from dynaplan.store.prefix_watcher import PrefixWatcher


class Discovery:
    """The instances of a namespace, followed by watch.

    While the store is away the last known instances stay; when it is back, a Snapshot replaces them.
    Reading costs a dictionary look-up, so it may be done for every request. Instances that cannot be called
    over HTTP, or not from the reader's own ``network`` (``Instance.network``), are left out, and named once.
    """

    def __init__(self, store: KeyValueStore, namespace: str, network: str = "") -> None:
        prefix = f"{SERVICES_PREFIX}{namespace}/"
        self._network = network
        self._watcher = PrefixWatcher(store, prefix, self._instance)
        self._by_endpoint: dict[tuple[str, str], tuple[Instance, ...]] = {}
        self._watcher.on_change(self._group)

    async def start(self) -> None:
        """Follow the registrations; return when the first snapshot is there, whenever the store answers."""
        await self._watcher.start()

    async def wait_failed(self) -> None:
        """Wait for the end of the watch that ``start`` began; raise the error, a bug, that ended it."""
        await self._watcher.wait_failed()

    def instances(self, component: str, endpoint: str = "generate") -> tuple[Instance, ...]:
        """Return the instances that serve the endpoint, in the order of their ids.

        Empty when there is none.
        """
        return self._by_endpoint.get((component, endpoint), ())

    def all(self) -> tuple[Instance, ...]:
        """Return every registration of the namespace, in key order."""
        return tuple(self._watcher.current.values())

    def has(self, key: str) -> bool:
        """Tell whether a registration with that key is known."""
        return key in self._watcher.current

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every change of the instances, from now on; return the function that ends it."""
        return self._watcher.on_change(callback)

    async def close(self) -> None:
        """Stop the watch; the last known instances stay readable."""
        await self._watcher.close()

    def _group(self) -> None:
        self._by_endpoint = _grouped(self._watcher.current)

    def _instance(self, item: KeyValue) -> Instance:
        """Read a registration; raises ValueError for what is none, and for an instance out of reach."""
        try:
            instance = Instance.from_json(item.value)
        except ValueError as error:
            raise ValueError(f"it is not a registration ({error})") from error
        if not instance.url:
            how = not_callable(item.value)
            raise ValueError(f"it is reached by {how}, and dynaplan calls over HTTP only")
        if not instance.is_reachable_from(self._network):
            where = f"{instance.url} of {instance.host or 'another host'}"
            raise ValueError(f"only that host reaches {where}; --advertise-host changes that")
        return instance


def _grouped(by_key: Mapping[str, Instance]) -> dict[tuple[str, str], tuple[Instance, ...]]:
    groups: dict[tuple[str, str], list[Instance]] = {}
    for instance in by_key.values():
        groups.setdefault((instance.component, instance.endpoint), []).append(instance)
    return {name: tuple(sorted(group, key=lambda each: each.instance_id)) for name, group in groups.items()}
