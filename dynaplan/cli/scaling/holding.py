"""The options ``--hold``, ``--for``, ``--at``, ``--at-least`` and ``--at-most``, and a hold in words."""

from __future__ import annotations

import os
import pwd
import socket
import time
from dataclasses import replace
from datetime import datetime

from dynaplan.cli.scaling.asking import AskedHold
from dynaplan.fleet.holds import MAX_HELD_WORKERS, MAX_HOLD_S, Hold, parse_hours
from dynaplan.graph.lifecycle import Role
from dynaplan.util.durations import clock, local_zone_name, moment, seconds_of, wall_clock
from dynaplan.util.errors import ConfigError


def asked_hold(
    is_held: bool,
    duration: str | None,
    at_least: int | None,
    at_most: int | None,
    hours: str | None = None,
) -> AskedHold | None:
    """Return the hold that the options ask for; None without any. Raises ConfigError."""
    if not (is_held or duration or hours is not None or at_least is not None or at_most is not None):
        return None
    if is_held and (at_least is not None or at_most is not None):
        raise ConfigError(
            "--hold fixes the number, --at-least and --at-most bound it",
            hint="Give one of them; bounds hold until `dynaplan release`, or --for 2h.",
        )
    if at_least is not None and at_most is not None and at_least > at_most:
        raise ConfigError(f"at least {at_least} and at most {at_most}: no number is both", hint="Swap them.")
    for bound in (at_least, at_most):
        if bound is not None and bound > MAX_HELD_WORKERS:
            raise ConfigError(f"{bound} workers", hint=f"The most is {MAX_HELD_WORKERS}.")
    return AskedHold(made_here(duration, hours), at_least, at_most)


def made_here(duration: str | None, hours: str | None = None) -> Hold:
    """Return a hold without bounds: made now, by this process and its user, for that time and these hours."""
    now_s = round(time.time(), 3)
    made = Hold(since_s=now_s, by=_user(), uid=os.getuid(), pid=os.getpid(), host=socket.gethostname()[:100])
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


def now_and_next(made: Hold, now_s: float) -> str:
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


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def described(role: Role, hold: Hold, now_s: float) -> str:
    """Return a sentence: the role, its bounds, their maker, their end and how to end them."""
    maker = f" by {hold.by} (uid {hold.uid}, pid {hold.pid} on {hold.host})" if hold.by else ""
    release = f"`dynaplan release {role.value}`"
    if hold.at:
        return f"{role.value} is held {hold.bounds}{maker} {hold.ending}: {now_and_next(hold, now_s)}"
    left_s = hold.left_s(now_s)
    if left_s is None:
        return f"{role.value} is held {hold.bounds}{maker} until {release}"
    left = f"{clock(left_s)} left" if left_s > 0 else "which is over"
    return f"{role.value} is held {hold.bounds}{maker} {hold.ending} ({left}), or until {release}"
