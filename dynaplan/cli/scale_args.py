"""The arguments of ``dynaplan scale`` made into counts and holds, and holds in words.

``decode=3``, ``decode=+1`` and the options ``--hold``, ``--for``, ``--at``, ``--at-least`` and ``--at-most``
are parsed and checked against what is desired and held now.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts
from dynaplan.contract.holds import MAX_HELD_WORKERS, MAX_HOLD_S, Hold, RoleHolds, parse_hours
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.planner.rules import guards
from dynaplan.util.amounts import seconds_of
from dynaplan.util.durations import clock, local_zone_name, moment, wall_clock
from dynaplan.util.errors import CapacityError, ConfigError, nearest

_ROLE = re.compile(r"[A-Za-z]\w*", re.ASCII)
_ARGUMENT = re.compile(r"([+-]?)(\d{1,5})", re.ASCII)


@dataclass(frozen=True)
class CountArgument:
    """One argument: the ``number`` of workers of the role, ``more`` or fewer than now, or only its bounds."""

    role: Role
    number: int | None = None
    more: int | None = None


@dataclass(frozen=True)
class HoldArgument:
    """The options that hold what is asked for; ``made`` has its maker and its end.

    Without ``at_least`` and ``at_most`` the number itself is held.
    """

    made: Hold
    at_least: int | None = None
    at_most: int | None = None

    @property
    def is_bound(self) -> bool:
        """True when bounds are given, and not the number itself."""
        return self.at_least is not None or self.at_most is not None

    def of(self, workers: int) -> Hold:
        """Return the hold of a role: by the given bounds, else at exactly this number of workers."""
        if not self.is_bound:
            return replace(self.made, at_least=workers, at_most=workers)
        return replace(self.made, at_least=self.at_least or 0, at_most=self.at_most)


@dataclass(frozen=True)
class ScaleArguments:
    """All that one ``dynaplan scale`` asks for.

    ``leaving`` names the worker that leaves first, or nothing. ``timeout_s`` is the time to wait until it is
    carried out: 0 for not at all, None for as long as it may well take. ``is_confirmed``: also where no
    worker would be left that answers.
    """

    counts: Sequence[CountArgument]
    hold: HoldArgument | None
    leaving: str
    timeout_s: float | None
    is_confirmed: bool

    @property
    def roles(self) -> list[Role]:
        return [each.role for each in self.counts]

    @property
    def has_hours(self) -> bool:
        """True when the hold is in force at some hours of the day only."""
        return self.hold is not None and bool(self.hold.made.at)

    def resolve(self, now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        """Return the counts to ask for, and all holds from then on; raises ConfigError."""
        wanted, after = resolve_counts(self.counts, self.hold, now, holds)
        if not self.is_confirmed:
            check_decode_left(wanted, after if self.hold else RoleHolds())
        return wanted, after


def join_counts(words: Sequence[str]) -> list[str]:
    """Join a role and the number behind it: ``decode 3`` is ``decode=3``."""
    joined: list[str] = []
    for place, word in enumerate(words):
        role = words[place - 1] if place else ""
        is_value = place > 1 and words[place - 2].startswith("--") and "=" not in words[place - 2]
        if _ARGUMENT.fullmatch(word) and _ROLE.fullmatch(role) and not is_value:
            joined[-1] = f"{role}={word}"
        else:
            joined.append(word)
    return joined


def parse_count(text: str, roles: Mapping[str, Role]) -> CountArgument:
    """Read ``decode=3``, ``decode=+1``, ``decode=-1`` or ``decode``; raises ConfigError."""
    name, equals, number = text.partition("=")
    if name not in roles:
        if _ARGUMENT.fullmatch(name):
            raise ConfigError(
                f"scale {text}: of which role?",
                hint=f"Write {' or '.join(f'{role}={name}' for role in _plain(roles))}.",
            )
        raise ConfigError(f"scale {text}: no role '{name}' here", hint=nearest(name, roles) or "Known: none.")
    if not equals:
        return CountArgument(roles[name])
    found = _ARGUMENT.fullmatch(number)
    if not found or int(found[2]) > MAX_HELD_WORKERS:
        raise ConfigError(
            f"scale {text}: '{number}' is not a number of workers",
            hint=f"For example: {name}=2, or {name}=+1 for one more than now.",
        )
    if found[1]:
        return CountArgument(roles[name], more=int(number))
    return CountArgument(roles[name], number=int(number))


def _plain(roles: Mapping[str, Role]) -> list[str]:
    """Return the names of the roles, without those of their components."""
    return [name for name, role in roles.items() if name == role.value]


def check_options(asked: Sequence[CountArgument], hold: HoldArgument | None) -> None:
    """Raise ConfigError for a role that is named twice, or with nothing to do."""
    for count in asked:
        name = count.role.value
        if sum(each.role is count.role for each in asked) > 1:
            raise ConfigError(f"{name} is named twice", hint=f"Name one number: {name}=2.")
        if count.number is None and count.more is None and not (hold and hold.is_bound):
            raise ConfigError(
                f"scale {name}: how many workers?",
                hint=f"For example: {name}=2, {name}=+1, or {name} --at-least 2.",
            )


def check_leaving(name: str, asked: Sequence[CountArgument], workers: Sequence[Worker]) -> None:
    """Raise ConfigError unless ``name`` is a worker of one of the roles that are scaled."""
    roles = {each.role for each in asked}
    known = [worker.name for worker in workers if worker.role in roles]
    if name not in known:
        named = "/".join(role.value for role in roles)
        raise ConfigError(
            f"--leaving {name}: no {named} worker of that name",
            hint=nearest(name, known) or f"There is {', '.join(known) or 'none'}.",
        )


def resolve_counts(
    asked: Sequence[CountArgument], hold: HoldArgument | None, now: DesiredCounts, holds: RoleHolds
) -> tuple[dict[Role, int], RoleHolds]:
    """Return the counts to ask for, and all holds from then on; raises ConfigError.

    A number outside a hold is refused unless it brings a hold of its own: the maker of the other one is
    not overridden by chance. A command's hold refuses any number, since the command takes its own back at
    the end. A hold with hours asks for no count: the planner scales to it when they open.
    """
    counts: dict[Role, int] = {}
    in_force = holds.in_force(time.time(), wall_clock)
    for each in asked:
        if hold and hold.made.at:
            holds = holds.replaced(each.role, _daily(each, hold))
            continue
        workers = _number(each, now)
        if hold:
            new = hold.of(workers)
            if each.number is None and each.more is None:
                workers = new.bounded(workers)
            _check_within(each.role, workers, new)
            holds = holds.replaced(each.role, new)
        elif (held := in_force.of(each.role)) and (held.holder or not held.allows(workers)):
            why = " while a command replaces workers" if held.holder else ""
            raise ConfigError(
                f"{each.role.value} is {held}{why}, so {workers} is not possible",
                hint=f"`dynaplan release {each.role.value}` ends that hold; --hold or --for 2h makes one of "
                "yours in its place.",
            )
        counts[each.role] = workers
    return counts, holds


def _number(asked: CountArgument, now: DesiredCounts) -> int:
    if asked.number is not None:
        return asked.number
    name, present = asked.role.value, now.of(asked.role)
    if present < 0:
        raise ConfigError(f"how many {name} workers there are is not decided yet", hint=f"Name it: {name}=2.")
    if present + (asked.more or 0) < 0:
        raise ConfigError(f"{name}={asked.more}: there are {present}", hint=f"The least is {name}=0.")
    return present + (asked.more or 0)


def _daily(asked: CountArgument, hold: HoldArgument) -> Hold:
    """Return the role's hold at certain hours; raises ConfigError for a relative number such as ``+1``."""
    name = asked.role.value
    if asked.more is not None:
        raise ConfigError(
            f"{name}={asked.more:+}: more than now means nothing at other hours",
            hint=f"Name the number: {name}=3, or bounds: {name} --at-least 2.",
        )
    held = hold.of(asked.number or 0)
    if asked.number is not None:
        _check_within(asked.role, asked.number, held)
    return held


def _check_within(role: Role, workers: int, hold: Hold) -> None:
    if not hold.allows(workers):
        raise ConfigError(
            f"{role.value}={workers} is outside of {hold.bounds.removeprefix('at ')}",
            hint=f"Name a number within the bounds, or only the role: {role.value}.",
        )


def check_decode_left(counts: Mapping[Role, int], holds: RoleHolds) -> None:
    """Raise ConfigError when no decode worker would be left, or none may be."""
    if counts.get(Role.DECODE) == 0 or (holds.decode and holds.decode.at_most == 0):
        raise ConfigError(
            "decode=0 leaves no worker that answers requests",
            hint="Add --yes if that is meant; `dynaplan stop` ends the deployment.",
        )


def check_gpus(
    fleet: FleetCounts, counts: Mapping[Role, int], left_out: Sequence[str] = (), *, has_gpus: bool = True
) -> None:
    """Raise CapacityError when all GPUs of the box are too few; GPUs that are in use now are waited for.

    ``left_out`` are lines on GPUs of the box that are not among them, and why. Where only cores compute (not
    ``has_gpus``) the number of GPUs bounds the number of workers.
    """
    need = counts.get(Role.PREFILL, fleet.prefill.present) * fleet.prefill.gpus
    need += counts.get(Role.DECODE, fleet.decode.present) * fleet.decode.gpus
    if need > fleet.gpus_total and not has_gpus:
        raise CapacityError(
            f"that is room for {need:g} workers, and this deployment has it for {fleet.gpus_total}",
            hint=f"Ask for fewer workers, or serve with --gpus {need:g}, which bounds their number.",
        )
    if need > fleet.gpus_total:
        others = "".join(f"\n  {line}: left out" for line in left_out)
        raise CapacityError(
            f"that needs {need:g} GPUs, and there are {fleet.gpus_total}{others}",
            hint="Ask for fewer workers, or end what uses the others."
            if others
            else "Ask for fewer workers.",
        )


def check_budget(settings: PlannerSettings, fleet: FleetCounts, holds: RoleHolds) -> None:
    """Raise ConfigError when what is held, and the minimum of the other role, is over the GPU budget."""
    pools = {Role.PREFILL: fleet.prefill, Role.DECODE: fleet.decode}
    need = 0
    for role in SCALED_ROLES:
        gpus, hold = guards.gpus_of(settings, fleet, role), holds.of(role)
        least = guards.min_workers(settings, gpus) if pools[role].present else 0
        need += (hold.bounded(least) if hold else least) * gpus
    if need > settings.max_gpu_budget:
        raise ConfigError(
            f"holding that takes {need} GPUs with the minimum of the other role, and the planner may use "
            f"{settings.max_gpu_budget}",
            hint=f"Hold fewer workers, or serve with --Planner.max-gpu-budget={need}.",
        )


def parse_hold(
    is_held: bool,
    duration: str | None,
    at_least: int | None,
    at_most: int | None,
    hours: str | None = None,
) -> HoldArgument | None:
    """Return the hold that the options ask for; None without any. Raises ConfigError."""
    if not (is_held or duration or hours is not None or at_least is not None or at_most is not None):
        return None
    if is_held and (at_least is not None or at_most is not None):
        raise ConfigError(
            "--hold fixes the number, --at-least and --at-most bound it",
            hint="Give one of them; bounds hold until `dynaplan release`, or --for 2h.",
        )
    if is_held and hours is not None:
        raise ConfigError(
            "--hold keeps the number at all hours, --at at some",
            hint="Give one of them: --at holds by itself, every day until `dynaplan release`.",
        )
    if at_least is not None and at_most is not None and at_least > at_most:
        raise ConfigError(f"at least {at_least} and at most {at_most}: no number is both", hint="Swap them.")
    for bound in (at_least, at_most):
        if bound is not None and bound > MAX_HELD_WORKERS:
            raise ConfigError(f"{bound} workers", hint=f"The most is {MAX_HELD_WORKERS}.")
    return HoldArgument(new_hold(duration, hours), at_least, at_most)


def new_hold(duration: str | None, hours: str | None = None) -> Hold:
    """Return a hold without bounds: made now, by this process and its user, for that time and these hours."""
    now_s = round(time.time(), 3)
    made = Hold(
        since_s=now_s, by=user_name(), uid=os.getuid(), pid=os.getpid(), host=socket.gethostname()[:100]
    )
    made = _within(made, hours) if hours is not None else made
    if duration is None:
        return made
    seconds = seconds_of(duration)
    if not seconds or seconds > MAX_HOLD_S:
        raise ConfigError(
            f"--for {duration}: expected a time of up to a year", hint="For example 90s, 10m, 2h or 1d."
        )
    until_s = now_s + seconds
    until = datetime.fromtimestamp(until_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    return replace(made, until_s=until_s, until=until)


def _within(made: Hold, hours: str) -> Hold:
    """Return the hold for these hours of this machine's time zone; raises ConfigError."""
    try:
        at = str(parse_hours(hours))
    except ValueError as error:
        raise ConfigError(
            f"--at {hours!r}: {error}",
            hint="For example 09:00-17:00. For days of the week have cron run `dynaplan scale`.",
        ) from None
    try:
        return replace(made, at=at, zone=local_zone_name())
    except ValueError as error:
        raise ConfigError(f"--at: {error}", hint="Set TZ to its name, as in TZ=Europe/Berlin.") from None


def describe_hours(made: Hold, now_s: float) -> str:
    """Return whether its hours are open, and when that changes: ``open now, until Mon 2026-11-23 17:00``."""
    try:
        wall, hours = wall_clock(made.zone), parse_hours(made.at)
    except ValueError as error:
        return f"never: {error}"
    change_s = hours.next_change_s(now_s, wall)
    if change_s is None:
        return "always open" if hours.is_open_at(now_s, wall) else "never open"
    when = moment(change_s, made.zone)
    return f"open now, until {when}" if hours.is_open_at(now_s, wall) else f"next from {when}"


def user_name() -> str:
    """Return the name of the user of this process."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def describe_hold(role: Role, hold: Hold, now_s: float) -> str:
    """Return a sentence: the role, its bounds, their maker, their end and how to end them."""
    maker = f" by {hold.by} (uid {hold.uid}, pid {hold.pid} on {hold.host})" if hold.by else ""
    release = f"`dynaplan release {role.value}`"
    if hold.at:
        return f"{role.value} is held {hold.bounds}{maker} {hold.ending}: {describe_hours(hold, now_s)}"
    left_s = hold.left_s(now_s)
    if left_s is None:
        return f"{role.value} is held {hold.bounds}{maker} until {release}"
    left = f"{clock(left_s)} left" if left_s > 0 else "which is over"
    return f"{role.value} is held {hold.bounds}{maker} {hold.ending} ({left}), or until {release}"
