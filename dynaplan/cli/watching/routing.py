"""The part of ``dynaplan status`` about routing: how frontends know what workers have cached."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dynaplan.store.instances import PUBLIC_URL, Instance
from dynaplan.util.documents import parse_object
from dynaplan.util.http_routes import EVENTS, ROUTING_PATH

if TYPE_CHECKING:
    import aiohttp

ANSWER_S = 1.0
"""Seconds in which a frontend must answer."""


async def routing(instances: Iterable[Instance]) -> dict[str, dict[str, str]]:
    """Ask the frontends among these; by worker and frontend, the source of what is known of its cache.

    A frontend that does not answer is left out, as is one that does not route by prefix.
    """
    import aiohttp

    from dynaplan.config import certificates

    frontends = {each.worker: each.url for each in instances if PUBLIC_URL in each.card}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(ssl=certificates.authorities(os.environ))
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        answers = await asyncio.gather(*(_answer(session, url) for url in frontends.values()))
    known: dict[str, dict[str, str]] = {}
    for frontend, answer in zip(frontends, answers, strict=True):
        for worker, source in answer.items():
            known.setdefault(worker, {})[frontend] = source
    return known


def routing_lines(known: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the sentences for a person: the workers that are told of, and each one that is predicted."""
    told = [worker for worker, sources in known.items() if set(sources.values()) == {EVENTS}]
    lines = [f"routed by what its engine says it has cached: {', '.join(sorted(told))}"] if told else []
    for worker, sources in sorted(known.items()):
        if worker not in told:
            by_source: dict[str, list[str]] = {}
            for frontend, source in sources.items():
                by_source.setdefault(source, []).append(frontend)
            where = "; ".join(
                source if len(by_source) == 1 else f"{source} (at {', '.join(sorted(frontends))})"
                for source, frontends in sorted(by_source.items())
            )
            lines.append(f"{worker} is routed by {where}")
    return lines


async def _answer(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    import aiohttp

    try:
        async with session.get(url + ROUTING_PATH) as response:
            answer = parse_object(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return {}
    return {str(worker): str(source) for worker, source in answer.items()}
