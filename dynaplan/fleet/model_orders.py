"""The writer of orders for models that are loaded on request (``model_keys``): of the CLI, and of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynaplan.fleet.model_keys import MODEL_ORDERS, ModelOrders
from dynaplan.fleet.store_keys import planner_prefix
from dynaplan.store.model import Transaction
from dynaplan.util.errors import TemporaryError

if TYPE_CHECKING:
    from dynaplan.store.port import KeyValueStore

ATTEMPTS = 20
"""Times that a change is tried when others change the orders at the same time."""


async def change_order(store: KeyValueStore, namespace: str, model: str, order: Mapping[str, Any]) -> None:
    """Change what is asked for the model, and nothing that is asked for others.

    Raises TemporaryError when others change the orders all the time.
    """
    key = planner_prefix(namespace) + MODEL_ORDERS
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
