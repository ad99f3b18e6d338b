"""A client's stream that has begun, with what another worker needs to go on with it."""

from __future__ import annotations

from aiohttp import web

from dynaplan.engines.api_rules import EngineApi
from dynaplan.gateway.migration.continuing import continuation, is_complete, may_migrate, obstacle
from dynaplan.gateway.migration.partial_answers import PartialAnswer, UnreadPages
from dynaplan.gateway.migration.splicing import Splice
from dynaplan.gateway.openai_api import Call


class BegunStream:
    """The one response to a client, whatever number of workers it takes to write it.

    ``asked`` is the client's request. Nothing is kept of a stream that can migrate nowhere; ``pages`` is the
    room for what is kept of the others.
    """

    def __init__(
        self, response: web.StreamResponse, asked: Call, api: EngineApi, limit: int, pages: UnreadPages
    ) -> None:
        self.response = response
        self.asked = asked
        self._partial = PartialAnswer(pages) if limit and may_migrate(asked, api) else None
        self._limit = limit
        self._splice: Splice | None = None
        self.migrations = 0

    def close(self) -> None:
        """Keep nothing of it any more: it has ended."""
        if self._partial:
            self._partial.close()

    async def write(self, events: bytes) -> bytes:
        """Pass a worker's whole events on; return them as they went to the client."""
        if self._splice:
            events = self._splice.spliced(events)
        if self._partial:
            self._partial.add(events)
        if events:
            await self.response.write(events)
        return events

    def is_complete(self) -> bool:
        """Tell whether nothing but the mark of its end is missing."""
        return self._partial is not None and is_complete(self.asked, self._partial)

    def obstacle(self, tokens: int, api: EngineApi) -> str:
        """Return why no other worker can go on after that number of tokens; empty when one can."""
        if self._partial is None:
            return "such a request does not migrate"
        if self.migrations == self._limit:
            return f"it has migrated {self._limit} times"
        return obstacle(self.asked, self._partial, tokens, api)

    def migrate(self, tokens: int, api: EngineApi) -> Call:
        """Return the request for the rest of the answer, whose events are written as this stream's."""
        assert self._partial is not None
        rest = continuation(self.asked, self._partial.text(), tokens, api)
        self._splice = Splice(self._partial, rest)
        self.migrations += 1
        return rest.call
