"""The hand-offs of remote prefills: prefill workers hold KV entries until they are told to release them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynaplan.events.port import Messenger
from dynaplan.events.prefill_requests import PrefillAnswer
from dynaplan.util.errors import DynaplanError
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandOff:
    """A computed prompt: ``fields`` go to the top level of the decode request's body and name the KV entries.

    ``release`` tells the prefill worker that the entries are not needed any more; only the first call counts.
    ``cached_tokens`` of the prompt came out of the prefill worker's cache; None where it does not say.
    ``instance_id`` is that worker's, 0 where it is not known. ``answering`` notes that the first token of a
    stream has come.
    """

    fields: Mapping[str, Any]
    release: Callable[[], None]
    cached_tokens: int | None = None
    instance_id: int = 0
    answering: Callable[[], None] = lambda: None


class HandOffs:
    """Tells prefill workers, in the background, which of their hand-offs they may free."""

    def __init__(self, connect: Callable[[], Awaitable[Messenger]], background: BackgroundTasks) -> None:
        self._connect = connect
        self._background = background
        self._held: dict[str, str] = {}

    def hold(self, answer: PrefillAnswer) -> None:
        """Remember the prefill worker of an answer that a request waits for, until ``release``."""
        if answer.release_to and not answer.error:
            self._held[answer.request_id] = answer.release_to

    def of(
        self, answer: PrefillAnswer, instance_id: int = 0, answering: Callable[[], None] = lambda: None
    ) -> HandOff:
        """Return the hand-off that the answer of this instance brings; ``answering`` is its own."""
        release = partial(self.release, answer.request_id)
        return HandOff(answer.hand_off, release, answer.cached_tokens, instance_id, answering)

    def release(self, request_id: str) -> None:
        """Tell the prefill worker that this request's hand-off is not needed any more, if one is held."""
        release_to = self._held.pop(request_id, "")
        if release_to:
            self._background.spawn(self._tell(release_to, request_id))

    def refuse(self, answer: PrefillAnswer) -> None:
        """Release the hand-off of an answer that no request waits for: it is late, or a redelivery's.

        A second answer from the worker that gave the first names the same entries, which are in use: it is
        kept.
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
