"""The options ``--hold``, ``--for``, ``--at-least`` and ``--at-most``, and a hold in words."""

from __future__ import annotations

import os
import pwd
import socket
import time
from datetime import datetime

from dynaplan.cli.scaling.asking import AskedHold
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.holds import LONGEST_S, MOST_WORKERS, Hold
from dynaplan.foundation.durations import clock, seconds_of


def asked_hold(
    is_held: bool, duration: str | None, at_least: int | None, at_most: int | None
) -> AskedHold | None:
    """Return the hold that the options ask for; None without any. Raises ConfigError."""
    if not (is_held or duration or at_least is not None or at_most is not None):
        return None
    if is_held and (at_least is not None or at_most is not None):
        raise ConfigError(
            "--hold fixes the number, --at-least and --at-most bound it",
            hint="Give one of them; bounds hold until `dynaplan release`, or --for 2h.",
        )
    if at_least is not None and at_most is not None and at_least > at_most:
        raise ConfigError(f"at least {at_least} and at most {at_most}: no number is both", hint="Swap them.")
    for bound in (at_least, at_most):
        if bound is not None and bound > MOST_WORKERS:
            raise ConfigError(f"{bound} workers", hint=f"The most is {MOST_WORKERS}.")
    return AskedHold(made_here(duration), at_least, at_most)


def made_here(duration: str | None) -> Hold:
    """Return a hold without bounds: made now, by this process and its user, for that time."""
    now_s = round(time.time(), 3)
    made = Hold(since_s=now_s, by=_user(), uid=os.getuid(), pid=os.getpid(), host=socket.gethostname()[:100])
    if duration is None:
        return made
    seconds = seconds_of(duration)
    if not seconds or seconds > LONGEST_S:
        raise ConfigError(
            f"--for {duration}: expected a time of up to a year", hint="For example 90s, 10m, 2h or 1d."
        )
    until_s = now_s + seconds
    until = datetime.fromtimestamp(until_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    return Hold(made.at_least, made.at_most, now_s, until_s, until, made.by, made.uid, made.pid, made.host)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def described(role: Role, hold: Hold, now_s: float) -> str:
    """Return a sentence: the role, its bounds, their maker, their end and how to end them."""
    maker = f" by {hold.by} (uid {hold.uid}, pid {hold.pid} on {hold.host})" if hold.by else ""
    release = f"`dynaplan release {role.value}`"
    left_s = hold.left_s(now_s)
    if left_s is None:
        return f"{role.value} is held {hold.bounds}{maker} until {release}"
    left = f"{clock(left_s)} left" if left_s > 0 else "which is over"
    return f"{role.value} is held {hold.bounds}{maker} {hold.ending} ({left}), or until {release}"
