"""The hand-offs of remote prefills: prefill workers hold KV entries for them until they hear from here."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynaplan.domain.errors import DynaplanError
from dynaplan.domain.prefill import PrefillAnswer
from dynaplan.ports import Messenger
from dynaplan.serving.background import Background

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandOff:
    """What a decode worker needs to take a computed prompt over: top-level ``fields`` of its request's body.

    ``release`` tells the prefill worker that nobody will take it any more; only the first call counts.
    """

    fields: Mapping[str, Any]
    release: Callable[[], None]


class HandOffs:
    """Tells prefill workers, in the background, which of their hand-offs they may let go."""

    def __init__(self, connect: Callable[[], Awaitable[Messenger]], background: Background) -> None:
        self._connect = connect
        self._background = background
        self._held: dict[str, str] = {}

    def hold(self, answer: PrefillAnswer) -> None:
        """Somebody waits for this answer: keep its hand-off until ``release``."""
        if answer.release_to and not answer.error:
            self._held[answer.request_id] = answer.release_to

    def of(self, answer: PrefillAnswer) -> HandOff:
        """The hand-off that the answer brings."""
        return HandOff(answer.hand_off, lambda: self.release(answer.request_id))

    def release(self, request_id: str) -> None:
        """Nobody needs that prefill's hand-off any more; nothing happens when none is held."""
        release_to = self._held.pop(request_id, "")
        if release_to:
            self._background.spawn(self._tell(release_to, request_id))

    def refuse(self, answer: PrefillAnswer) -> None:
        """Nobody waits for this answer: it is late, or a redelivery's.

        A second answer of the worker that gave the first stands for the same entries, which are in use.
        """
        in_use = self._held.get(answer.request_id)
        if answer.release_to and not answer.error and answer.release_to != in_use:
            self._background.spawn(self._tell(answer.release_to, answer.request_id))

    async def _tell(self, release_to: str, request_id: str) -> None:
        try:
            messenger = await self._connect()
            await messenger.publish(release_to, request_id.encode())
        except DynaplanError as error:
            log.debug("the hand-off of %s stays until it expires: %s", request_id, error)
