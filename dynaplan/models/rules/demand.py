"""What becomes of one model in demand: loaded, given room by others, told to wait, or refused.

The models in demand are gone through by their deadlines (``turns``). What is decided for one is in the two
pictures (``draft``) when the next one is looked at. A model in demand

a. is loaded, or woken, when there is room for it in both pictures,
b. waits when there is room in the future only: those who leave are making it,
c. is loaded into room that an earlier demand waits for, when it will be ready, and have its minimum stay
   behind it, before that demand is overdue,
d. makes others leave: those with nothing to do, and, when it is overdue, those that answer (``eviction``),
e. waits for its turn. A place is held for it as if its turn had come, so that later demands do not move into
   it; where only an earlier demand is in the way, it waits behind that,
f. is refused: it is larger than its devices (503), what has the room is pinned (409) or foreign (503), or
   nobody can leave before its requests have waited too long (503).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from dynaplan.models.model import ModelState
from dynaplan.models.rules import ladder
from dynaplan.models.rules.draft import Draft
from dynaplan.models.rules.eviction import EvictionChoice, choose, idle_s, must_leave, score
from dynaplan.models.rules.memory import Holding, Need, free_bytes, has_room, load_s
from dynaplan.models.rules.turns import (
    Leave,
    Tenure,
    count,
    deadline_s,
    demand_since_s,
    seconds,
    tenure_of,
)
from dynaplan.util.amounts import gib

RETRY_AFTER_S = 30.0
"""The ``Retry-After`` where nobody knows when there will be room: other programs hold it."""

MAY_BE_LOADED = (ModelState.UNLOADED, ModelState.ASLEEP, ModelState.FAILED)


class Demands:
    """The demands of one plan, served by their deadline.

    ``_backfill_until_s`` is when the first of those in line takes the room that it waits for.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._now_s = draft.now_s
        self._backfill_until_s = inf

    def serve(self) -> None:
        draft = self._draft
        wanted = [
            (deadline_s(draft.settings(name), status), demand_since_s(draft.settings(name), status), name)
            for name, status in draft.statuses.items()
            if draft.is_configured(name)
            and name not in draft.settled
            and status.state in MAY_BE_LOADED
            and demand_since_s(draft.settings(name), status) is not None
        ]
        for due_s, _, name in sorted(wanted):
            self._serve(name, due_s)

    def _serve(self, name: str, due_s: float) -> None:
        """Decide about one demand; the letters are those of the module's head."""
        draft, wanted = self._draft, self._wanted(name)
        draft.future.pop(name, None)  # what a sleeper holds is part of what it needs when it wakes
        forced = self._forced(name, draft.future)
        choice = None if forced else choose(wanted, draft.devices, draft.future, [])
        if choice is not None and self._start(wanted):  # a
            return
        if choice is not None:  # b
            self._backfill_until_s = -inf
            draft.hold(wanted, choice.devices)
            draft.say(name, "room", f"waits until {', '.join(draft.drainers)} has given its memory back")
            return
        if self._backfill(wanted):  # c
            return
        most = Leave.FOR_OVERDUE if due_s <= self._now_s else Leave.AT_ONCE
        if not (self._evict(wanted, forced, most) or self._wait(wanted, forced, due_s)):  # d, e
            self._refuse(wanted, forced)  # f

    def _wanted(self, name: str) -> Need:
        """Return the model's need; a sleeper can have its own devices only."""
        status, wanted = self._draft.statuses[name], self._draft.needs[name]
        if status.state is not ModelState.ASLEEP or not status.placed_on:
            return wanted
        return replace(wanted, allowed=frozenset(status.placed_on))

    def _forced(self, name: str, loaded: Iterable[str]) -> frozenset[str]:
        """Return the loaded workers that the owner's constraints forbid beside this model."""
        draft, others = self._draft, [each for each in loaded if each != name]
        models = list(dict.fromkeys(map(draft.model_of, others)))
        priorities = {each: draft.settings(each).priority for each in models}
        leaving = must_leave(draft.constraints, name, models, priorities)
        return frozenset(each for each in others if draft.model_of(each) in leaving)

    # a, c: there is room

    def _start(self, wanted: Need) -> bool:
        """Start the model if there is room for it now and later; tell whether it was started."""
        draft, name = self._draft, wanted.model
        others = {each: held for each, held in draft.present.items() if each != name}
        if self._forced(name, others):
            return False
        both = [each for each in draft.devices if has_room(wanted, each, others)]
        choice = choose(wanted, both, draft.future, [])
        if choice is not None:
            draft.start(wanted, choice.devices, f"{self._asked_by(name)}; there is room")
        return choice is not None

    def _backfill(self, wanted: Need) -> bool:
        """Start the model in room that an earlier demand waits for; tell whether it was.

        Only if it will be loaded and have had its least stay by then.
        """
        draft, name = self._draft, wanted.model
        settings, others = draft.settings(name), {k: v for k, v in draft.present.items() if k != name}
        free_again_s = self._now_s + load_s(settings, draft.statuses[name]) + settings.min_stay_s
        # inf: nobody is in line before it, so a has looked at all room there is. -inf: all room is promised.
        is_in_time = free_again_s < self._backfill_until_s < inf
        if not is_in_time or settings.is_pinned or self._forced(name, others):
            return False
        choice = choose(wanted, draft.devices, others, [])
        if choice is not None:
            why = f"{self._asked_by(name)}; it is ready before those in line before it take the room"
            draft.start(wanted, choice.devices, why)
        return choice is not None

    def _asked_by(self, name: str) -> str:
        status = self._draft.statuses[name]
        if status.waiting:
            return f"{count(status.waiting)} waiting"
        return "its owner asked for it" if status.load_asked_s is not None else "it is pinned"

    # d: others leave

    def _candidates(self, level: Leave) -> list[str]:
        """Return the workers whose unloading is allowed at ``level``: those allowed at a lower level first,
        then those of lower value. A prefill worker has the value of its model, and precedes it."""
        draft = self._draft
        found = []
        for name in draft.future:
            if name not in draft.settled and (tenure := self._tenure(name)).leave <= level:
                is_prefill = draft.statuses[name].is_prefill
                valued = draft.model_of(name) if is_prefill else name
                worth = -score(draft.settings(valued), draft.statuses[valued], self._now_s)
                found.append((tenure.leave, worth, not is_prefill, name))
        return [name for *_, name in sorted(found)]

    def _tenure(self, name: str) -> Tenure:
        return tenure_of(self._draft.settings(name), self._draft.statuses[name], self._now_s)

    def _choose(
        self, wanted: Need, forced: frozenset[str], candidates: Sequence[str]
    ) -> EvictionChoice | None:
        """Return where the model goes and all who leave for it; None if not ``candidates`` alone suffice."""
        if not forced <= set(candidates):
            return None
        left = {name: held for name, held in self._draft.future.items() if name not in forced}
        others = [each for each in candidates if each not in forced]
        choice = choose(wanted, self._draft.devices, left, others)
        if choice is None:
            return None
        return EvictionChoice(choice.devices, tuple(sorted({*forced, *choice.leaving}, key=candidates.index)))

    def _evict(self, wanted: Need, forced: frozenset[str], most: Leave) -> bool:
        """Make room by candidates that may leave by ``most``, as few levels as needed.

        Tell whether there were any.
        """
        for leave in (each for each in (Leave.AT_ONCE, Leave.FOR_OVERDUE) if each <= most):
            choice = self._choose(wanted, forced, self._candidates(leave))
            if choice is not None:
                break
        else:
            return False
        draft = self._draft
        held = {name: draft.future.pop(name) for name in choice.leaving}
        draft.hold(wanted, choice.devices)
        for name in choice.leaving:
            self._put_away(name, held[name], wanted.model)
        self._backfill_until_s = -inf
        draft.say(wanted.model, "room", f"{', '.join(choice.leaving)} leaves for it")
        return True

    def _put_away(self, name: str, held: Holding, other: str) -> None:
        """Let a model leave for another: asleep, where that makes room enough; else unloaded."""
        draft = self._draft
        settings, status = draft.settings(name), draft.statuses[name]
        devices = [each for each in draft.devices if each.index in held.bytes]
        spare = min((free_bytes(each, draft.future) for each in devices), default=0)
        level = ladder.for_room(settings, status, spare, ladder.host_of(draft.devices), draft.future)
        why = f"makes room for {other}: {self._why_it_may_leave(name, other)}"
        if level:
            draft.sleep(name, "room", level.name, why)
        else:
            draft.unload(name, "room", why)

    def _why_it_may_leave(self, name: str, other: str) -> str:
        settings, status = self._draft.settings(name), self._draft.statuses[name]
        tenure, idle = self._tenure(name), idle_s(status, self._now_s)
        if tenure.leave is Leave.FOR_OVERDUE:
            since_s = demand_since_s(self._draft.settings(other), self._draft.statuses[other])
            waited_s = self._now_s - (self._now_s if since_s is None else since_s)
            return f"{tenure.why}, but {other} has waited for {waited_s:.0f} s (max-swap-wait)"
        if status.replica_of:
            return tenure.why
        rests = f"idle for {seconds(idle)}" if status.state is ModelState.READY else tenure.why
        return f"{rests}; a load takes {seconds(load_s(settings, status))}, priority {settings.priority:g}"

    # e: its turn has not come

    def _wait(self, wanted: Need, forced: frozenset[str], due_s: float) -> bool:
        for leave in (Leave.FOR_OVERDUE, Leave.NOT_YET):
            choice = self._choose(wanted, forced, self._candidates(leave))
            if choice is not None:
                self._wait_for_turn(wanted, choice, due_s)
                return True
        behind = sorted(self._draft.settled & self._draft.future.keys())
        choice = self._choose(wanted, forced, [*behind, *self._candidates(Leave.NOT_YET)])
        if choice is not None:
            first = [name for name in choice.leaving if name in behind]
            self._draft.say(wanted.model, "turn", f"waits behind {', '.join(first)}")
            self._draft.plan_again_at(due_s)
        return choice is not None

    def _wait_for_turn(self, wanted: Need, choice: EvictionChoice, due_s: float) -> None:
        """Hold the place that the model will have in its turn.

        Where the turn comes after ``load-timeout``, refuse the requests that would wait for it in vain.
        """
        draft, name = self._draft, wanted.model
        tenures = {each: self._tenure(each) for each in choice.leaving}
        reasons = ", ".join(f"{each} {tenure.why}" for each, tenure in tenures.items())
        until_s = max(
            (each.until_s for each in tenures.values() if each.leave is Leave.NOT_YET), default=-inf
        )
        timeout_s = draft.settings(name).load_timeout_s
        if draft.statuses[name].oldest_arrival_s + timeout_s < until_s < inf:
            why = f"there is no room within {timeout_s:.0f} s (load-timeout): {reasons}"
            draft.refuse(name, 503, why, until_s - self._now_s, until_s - timeout_s)
            return
        for each in choice.leaving:
            draft.future.pop(each)
        draft.hold(wanted, choice.devices)
        self._backfill_until_s = min(self._backfill_until_s, max(due_s, until_s if until_s < inf else due_s))
        for at_s in (due_s, *(tenure.until_s for tenure in tenures.values())):
            draft.plan_again_at(at_s)
        when = f"its turn comes in {due_s - self._now_s:.0f} s" if due_s > self._now_s else "it is next"
        draft.say(name, "turn", f"{reasons}; {when}")

    # f: there is none

    def _refuse(self, wanted: Need, forced: frozenset[str]) -> None:
        draft, name = self._draft, wanted.model
        everybody = [*sorted(draft.settled & draft.future.keys()), *self._candidates(Leave.NEVER)]
        choice = self._choose(wanted, forced, everybody)
        pinned = sorted(each for each in choice.leaving if draft.settings(each).is_pinned) if choice else []
        if draft.statuses[name].state is ModelState.ASLEEP:
            draft.unload(name, "room", "it cannot wake where it sleeps: what stays there needs the room")
        elif pinned:
            draft.refuse(name, 409, f"there is no room for it beside {', '.join(pinned)}: pinned")
        elif self._is_too_large(wanted):
            draft.refuse(name, 503, self._too_large(wanted))
        else:
            draft.refuse(name, 503, self._too_full(wanted), RETRY_AFTER_S)

    def _is_too_large(self, wanted: Need) -> bool:
        allowed = [each for each in self._draft.devices if wanted.may_have(each)]
        return sum(each.total_bytes >= wanted.bytes_on(each.index) for each in allowed) < wanted.places

    def _too_large(self, wanted: Need) -> str:
        allowed = [each for each in self._draft.devices if wanted.may_have(each)]
        needs = gib(wanted.bytes_each) + (f" on each of {wanted.devices} GPUs" if wanted.devices > 1 else "")
        sizes = ", ".join(f"{ladder.device_name(each.index)} {gib(each.total_bytes)}" for each in allowed)
        unusable = [
            f"{ladder.device_name(each.index)}: {each.unusable}"
            for each in self._draft.devices
            if each.unusable
        ]
        by = f" ({wanted.chosen_by})" if wanted.chosen_by else ""
        return f"it needs {needs}; it may have {'; '.join([sizes or 'nothing', *unusable])}{by}"

    def _too_full(self, wanted: Need) -> str:
        held = ", ".join(
            f"{gib(each.foreign_bytes)} of {gib(each.total_bytes)} of {ladder.device_name(each.index)}"
            for each in self._draft.devices
            if wanted.may_have(each) and each.foreign_bytes
        )
        return f"it needs {gib(wanted.bytes_each)}; other programs hold {held or 'what is there'}"
