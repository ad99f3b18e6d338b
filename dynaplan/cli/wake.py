"""``dynaplan wake``: wake the workers whose engines sleep."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dynaplan.cli.options import namespace_option
from dynaplan.cli.running_deployment import connect
from dynaplan.cli.timing import AWAKE_POLL_S
from dynaplan.gateway.routing.sleeping_workers import request_wake
from dynaplan.store import connections
from dynaplan.store.instances import ASLEEP, SERVICES_PREFIX, Instance
from dynaplan.store.model import Transaction
from dynaplan.util.errors import ConfigError, TemporaryError, nearest

if TYPE_CHECKING:
    from dynaplan.store.port import Store


@click.command(name="wake")
@click.argument("worker", required=False)
@namespace_option
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds to wait.")
def command(worker: str | None, namespace: str | None, timeout_s: float) -> None:
    """Wake WORKER, or every worker that `dynaplan status` shows as asleep.

    A request wakes one, too, when all are asleep. vLLM can be woken only with VLLM_SERVER_DEV_MODE=1.
    """
    found = connect(namespace)
    names = [each.name for each in found.workers]
    if worker and worker not in names:
        raise ConfigError(f"there is no worker {worker!r}", hint=nearest(worker, names))
    asyncio.run(_wake(found.namespace, worker, timeout_s))


async def _wake(namespace: str, worker: str | None, timeout_s: float) -> None:
    """Wake the worker, or all for None, and wait until they are awake; TemporaryError when one is not."""

    begun_s = time.monotonic()
    async with connections.open_store() as store:
        asleep = {
            name: each
            for name, each in (await _sleeping_workers(store, namespace)).items()
            if worker in (None, name)
        }
        if not asleep:
            click.echo(f"{worker or 'no worker'} is {'awake' if worker else 'asleep'}")
            return
        await _request_wake(store, namespace, asleep)
        while asleep:
            still = await _sleeping_workers(store, namespace)
            registered = await _instances(store, namespace)
            if gone := asleep.keys() - registered.keys():
                raise TemporaryError(f"{', '.join(sorted(gone))}: gone", hint="`dynaplan status` says more.")
            for name in asleep.keys() - still.keys():
                click.echo(f"{name} is awake after {time.monotonic() - begun_s:.1f} s")
            asleep = {name: still[name] for name in asleep.keys() & still.keys()}
            for name, (_, reason) in asleep.items():
                if reason:
                    raise TemporaryError(f"{name} cannot be woken: {reason}")
            if asleep and time.monotonic() - begun_s > timeout_s:
                raise TemporaryError(f"{', '.join(sorted(asleep))}: not awake within {timeout_s:g} s")
            await asyncio.sleep(AWAKE_POLL_S)


async def _request_wake(store: Store, namespace: str, asleep: dict[str, tuple[int, str]]) -> None:
    """Request a wake of each worker, after clearing its earlier reason, so that a new one is the answer.

    Raises TemporaryError when the store does not answer.
    """

    for instance_id, _ in asleep.values():
        key = ASLEEP.key(namespace, instance_id)
        await store.commit(Transaction(puts={key: ""}, lease=instance_id))
        if not await request_wake(store, namespace, instance_id):
            raise TemporaryError("the key-value store does not answer", hint="Try again.")


async def _sleeping_workers(store: Store, namespace: str) -> dict[str, tuple[int, str]]:
    """Return the instance id of each sleeping worker, and the reason why it cannot be woken, or empty."""

    items = await store.list(ASLEEP.prefix(namespace))
    reasons = {ASLEEP.instance(namespace, item.key): item.value for item in items}
    instances = await _instances(store, namespace)
    return {name: (each, reasons[each]) for name, each in instances.items() if each in reasons}


async def _instances(store: Store, namespace: str) -> dict[str, int]:
    """Return the instance id of each worker that is registered."""

    found: dict[str, int] = {}
    for item in await store.list(f"{SERVICES_PREFIX}{namespace}/"):
        with suppress(ValueError):  # `status` names it
            instance = Instance.from_json(item.value)
            found[instance.worker] = instance.instance_id
    return found
