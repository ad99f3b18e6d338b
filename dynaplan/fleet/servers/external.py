"""The checks of servers that the user has named: ``serve`` starts nothing unless they can be used."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from dynaplan.config.settings.servers import ETCD, FILE, NATS, NATS_VARIABLE, PLACES, store_backend
from dynaplan.events import event_connections
from dynaplan.store import connections
from dynaplan.util.errors import PermanentError, TemporaryError, UserError
from dynaplan.util.masking import mask_secrets

HINTS: Mapping[str, str] = {
    ETCD: "Start it, correct {where} and ETCD_AUTH_*, or unset it to let dynaplan bring an etcd along.",
    NATS: "Start it with JetStream, correct {where} and NATS_AUTH_*, or unset it to let dynaplan bring one.",
    FILE: "Expected a directory of yours with mode 0700 on a disk of this machine, or a path to make one at.",
}


async def check_external_store(environ: Mapping[str, str], namespace: str) -> None:
    """Raise UserError unless the store that the user has named answers, and lets us write."""
    backend = store_backend(environ)
    where = PLACES[backend]
    store = connections.connect_store()
    probe = f"v1/{namespace}/probe/{secrets.token_hex(8)}"
    try:
        await store.identity()
        await store.put(probe, "")
        await store.delete(probe)
    except (TemporaryError, PermanentError) as error:
        raise UserError(
            f"the key-value store at {where}={mask_secrets(environ.get(where, ''))} cannot be used: {error}",
            hint=HINTS[backend].format(where=where),
        ) from error
    finally:
        await store.close()


async def check_external_nats(environ: Mapping[str, str], stream: str = "") -> None:
    """Raise UserError unless the NATS server that the user has named answers, and lets us in.

    ``stream`` is the one that the prefill queue will be in, and is made; empty when there is no queue.
    """
    try:
        messenger = await event_connections.connect_messenger()
        try:
            if stream:
                await messenger.queue(stream)
        finally:
            await messenger.close()
    except (TemporaryError, PermanentError) as error:
        raise UserError(
            f"the server at NATS_SERVER={mask_secrets(environ[NATS_VARIABLE])} cannot be used: {error}",
            hint="Start it with JetStream, correct NATS_SERVER and NATS_AUTH_*, or unset it to let dynaplan "
            "bring one along.",
        ) from error
