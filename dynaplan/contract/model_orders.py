"""Writing what a person, or a client, asks for a model: into the key that the fleet plugin follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaplan.contract.model_keys import MODEL_ORDERS, ModelOrders
from dynaplan.contract.store_keys import scaling_key
from dynaplan.store.model import Transaction
from dynaplan.store.port import KeyValueStore
from dynaplan.util.errors import TemporaryError

ATTEMPTS = 20
"""Times that a change is tried when others change the orders at the same time."""


async def change_order(store: KeyValueStore, namespace: str, model: str, order: Mapping[str, Any]) -> None:
    """Change these fields of the model's order in the store, and nothing of other models'.

    Orders that cannot be read are replaced. Raises StoreUnavailable, or TemporaryError when others keep
    changing them.
    """
    key = scaling_key(namespace, MODEL_ORDERS)
    for _ in range(ATTEMPTS):
        item = await store.get(key)
        try:
            orders = ModelOrders.from_text(item.value if item else "")
        except ValueError:
            orders = ModelOrders({})
        text = orders.changed(model, **order).to_text()
        if await store.commit(Transaction({key: item.revision if item else 0}, {key: text})):
            return
    raise TemporaryError("somebody else changes the models all the time", hint="Try again.")


def load_order(now_unix_s: float, keep_s: float = 0.0) -> dict[str, Any]:
    """Return the order to load a model now, and to keep it for ``keep_s`` seconds, if any.

    It is pinned after that only if the configuration says so.
    """
    keep_until_unix_s = now_unix_s + keep_s if keep_s else 0.0
    return {"load_unix_s": now_unix_s, "keep_until_unix_s": keep_until_unix_s, "is_pinned": None}


def unload_order(now_unix_s: float) -> dict[str, Any]:
    """Return the order to put a model away; a pinned one is unpinned."""
    return {"unload_unix_s": now_unix_s, "keep_until_unix_s": 0.0, "is_pinned": False}
