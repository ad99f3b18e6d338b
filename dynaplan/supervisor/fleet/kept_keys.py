"""Keys of the planner that the statefile remembers: they outlive a store that loses what was written to it.

Level-triggered, like the fleet keeper: a key that is there is written down, one that is missing is written
again. So nobody ends a hold by deleting its key; ``dynaplan release`` writes ``{}``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dynaplan.domain.errors import StatefileUnwritable
from dynaplan.domain.planning.holds import HOLDS, RoleHolds
from dynaplan.domain.planning.scaling import COUNT_KEYS
from dynaplan.domain.wire.documents import whole_number

if TYPE_CHECKING:
    from dynaplan.supervisor.fleet.document import Statefile
    from dynaplan.supervisor.fleet.store_link import StoreLink

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Seconds between two looks; a planner decides a few times a minute."""


def _number(text: str) -> int:
    found = whole_number(text)
    if found is None or found < 0:
        raise ValueError(f"{text!r} is not a number of workers or decisions")
    return found


READERS: Mapping[str, Callable[[str], object]] = {
    HOLDS: RoleHolds.from_text,
    **dict.fromkeys(COUNT_KEYS.values(), _number),
    "decision_id": _number,
}
"""The keys that are kept, by name, and how each is read: a value that raises ValueError is not kept."""


class KeptKeys:
    """Keeps the planner's keys in statefile and store alike, and ends holds whose deadline has passed.

    ``say(line)`` tells the user of that; ``unix_time_s`` is the wall clock.
    """

    def __init__(
        self,
        link: StoreLink,
        statefile: Statefile,
        say: Callable[[str], None],
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._statefile = statefile
        self._say = say
        self._unix_time_s = unix_time_s
        self._ended = ""

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Compare the store with the statefile once, and mend what differs."""
        found = self._link.planner_keys
        if found is None:
            return
        before = self._statefile.planner_keys
        kept = {
            **before,
            **{name: found[name] for name in READERS if name in found and _is_good(name, found)},
        }
        if kept != before:
            try:
                self._statefile.record_planner_keys(kept)
            except StatefileUnwritable as error:
                log.warning("the planner's keys are not in the statefile yet: %s", error)
        if lost := {name: value for name, value in kept.items() if name not in found}:
            self._say(f"The key-value store has lost {', '.join(lost)}: written again.")
            self._link.restore(lost)
        self._end_holds(kept.get(HOLDS, ""))

    def _end_holds(self, text: str) -> None:
        """Release holds that are over, so that a clock which is set back does not revive them."""
        holds = RoleHolds.from_text(text) if _is_good(HOLDS, {HOLDS: text}) else RoleHolds()
        in_force = holds.in_force(self._unix_time_s())
        if holds == in_force:
            return
        self._link.replace(HOLDS, text, in_force.to_text())
        if text != self._ended:
            self._ended = text
            for role, hold in holds.by_role.items():
                if in_force.of(role) is None:
                    self._say(f"{role.value} was {hold}: that is over.")


def _is_good(name: str, values: Mapping[str, str]) -> bool:
    try:
        READERS[name](values[name])
    except ValueError:
        return False
    return True
