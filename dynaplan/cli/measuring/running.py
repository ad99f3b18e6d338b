"""One measurement from its first request to its last answer, or to Ctrl-C."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from dynaplan.cli.measuring.prompt_pool import PromptPool
from dynaplan.cli.measuring.sending import Sender, Target
from dynaplan.cli.measuring.tally import Tally
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.process.signals import on_signals
from dynaplan.simulation.outcome import Slo
from dynaplan.util.descriptors import raise_descriptor_limit
from dynaplan.util.errors import DeploymentError
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    import aiohttp

    from dynaplan.cli.measuring.fleet_watch import FleetWatch
    from dynaplan.util.tls.client import ClientTls

TICK_S = 0.5
"""Seconds between two drawings of the live line."""

REQUEST_TIMEOUT_S = 1800.0
"""Seconds that a whole answer may take, as the frontend has it."""

MODELS_S = 10.0
"""Seconds in which the service must name its models."""


@dataclass(frozen=True)
class OfferedLoad:
    """The load of a measurement: ``clients`` that send ``request`` again and again, or with 0 a ``trace``.

    Nothing new is sent after ``duration_s``.
    """

    clients: int
    request: TracedRequest
    trace: Callable[[], Iterator[TracedRequest]]
    duration_s: float

    def requests(self, duration_s: float) -> Iterator[TracedRequest]:
        """Return the trace's requests that are due before that time."""
        return takewhile(lambda request: request.arrival_s < duration_s, self.trace())

    async def send(self, sender: Sender) -> None:
        """Send the load, and wait for the last answer."""
        if self.clients:
            await sender.clients(self.clients, self.request)
        else:
            await sender.trace(self.requests(self.duration_s))


@dataclass(frozen=True)
class Door:
    """The way into the service: its base address, the key, what to verify it by, and the model to ask for.

    Without a model it is the first that is served. ``is_text``: prompts are texts, not token ids.
    """

    url: str
    api_key: str
    tls: ClientTls
    model: str = ""
    is_text: bool = False


@dataclass(frozen=True)
class Measured:
    """A measurement that is over. ``sending_s`` is the time in which new requests were sent, in seconds.

    ``client_load`` is the part of a core that this client took.
    """

    tally: Tally
    model: str
    sending_s: float
    client_load: float
    is_interrupted: bool


async def measure(door: Door, load: OfferedLoad, slo: Slo, seed: int, fleet: FleetWatch | None) -> Measured:
    """Send the load and return what came of it; SIGINT and SIGTERM end it with what there is.

    Raises DeploymentError when the service does not say which model it has.
    """
    import aiohttp

    raise_descriptor_limit()  # a trace has as many requests open as it has
    pool = PromptPool(is_text=door.is_text, seed=seed)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {door.api_key}"} if door.api_key else {},
        connector=aiohttp.TCPConnector(limit=0, ssl=door.tls),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    ) as session:
        model = door.model or await _model(session, door.url)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        tally = Tally(slo, began_s)
        sender = Sender(session, Target(door.url, model), pool, tally)
        work = asyncio.create_task(load.send(sender))
        is_whole = await _watch(work, sender, tally, load.duration_s, fleet)
        passed_s = time.perf_counter() - began_s
        used_s = time.process_time() - cpu_s
    return Measured(
        tally,
        model,
        min(passed_s, load.duration_s),
        used_s / max(passed_s, 1e-9),
        is_interrupted=not is_whole,
    )


async def _watch(
    work: asyncio.Task[None], sender: Sender, tally: Tally, duration_s: float, fleet: FleetWatch | None
) -> bool:
    """Show the live line until the work is done; return False when a signal has ended it."""
    until_s = tally.began_s + duration_s
    with on_signals(lambda _: _cancel(work)), ProgressLine() as line:
        while not work.done():
            now_s = time.perf_counter()
            is_sending = now_s < until_s
            await asyncio.wait({work}, timeout=min(TICK_S, until_s - now_s) if is_sending else TICK_S)
            now_s = time.perf_counter()
            if now_s >= until_s:
                sender.stop()
            if fleet:
                fleet.look(min(now_s, until_s))
            line.show(tally.line(now_s, until_s if now_s < until_s else None))
    if work.cancelled():
        return False
    work.result()
    return True


def _cancel(work: asyncio.Task[None]) -> None:
    work.cancel()


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first model that the service names; raises DeploymentError when it names none."""
    import aiohttp

    try:
        async with asyncio.timeout(MODELS_S), session.get(f"{url}/v1/models") as response:
            if response.status != 200:
                raise DeploymentError(
                    f"{url}/v1/models answers {response.status}: {(await response.text())[:300]}",
                    hint="With 401, set DYNAPLAN_API_KEY or give --api-key.",
                )
            listed = (await response.json(content_type=None))["data"]
            models = [str(each["id"]) for each in listed]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise DeploymentError(
            f"{url} does not answer: {error or type(error).__name__}",
            hint="`dynaplan status` shows what runs.",
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"{url}/v1/models is no list of models",
            hint="Expected the base address of an OpenAI-compatible API.",
        ) from error
    if not models:
        raise DeploymentError(f"{url} serves no model yet", hint="`dynaplan status` shows when one is ready.")
    return models[0]
