"""What a person changes by a command, written down beside the planners' decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynaplan.cli.scale_args import user_name
from dynaplan.planner.recorders.manual_changes import ManualChange, record_manual_change

if TYPE_CHECKING:
    from dynaplan.cli.scale_counts import WrittenCounts
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.graph.lifecycle import Role


def record_by_hand(found: RunningDeployment, what: str) -> None:
    """Record that this user has changed ``what`` just now."""
    record_manual_change(found.log_dir, ManualChange(round(time.time(), 3), user_name(), what))


def record_scaling(
    found: RunningDeployment, roles: Sequence[Role], written: WrittenCounts, leaving: str = ""
) -> None:
    """Record new counts and holds of these roles; nothing where both are as before."""
    what = [words for role in roles if (words := _scaled(role, written))]
    if not what:
        return
    if leaving:
        what.append(f"{leaving} leaves first")
    counts = written.counts_before
    before = {role.value: counts.of(role) for role in written.asked if counts.of(role) >= 0}
    after = {role.value: number for role, number in written.asked.items()}
    change = ManualChange(
        round(time.time(), 3), user_name(), ", ".join(what), before, after, written.decision_id
    )
    record_manual_change(found.log_dir, change)


def _scaled(role: Role, written: WrittenCounts) -> str:
    """Return ``decode 4 -> 2, held at 2 until 18:00``; empty where nothing was asked for."""
    held, hold = written.holds_before.of(role), written.holds.of(role)
    if hold == held:
        ending = ""
    elif hold:
        ending = f"held {hold.bounds} {hold.ending}"
    else:
        ending = f"released, it was {held}"
    if role not in written.asked:
        return f"{role.value} {ending}" if ending else ""
    number, before = written.asked[role], written.counts_before.of(role)
    change = f"{before} -> {number}" if 0 <= before != number else f"{number} again"
    return f"{role.value} {change}" + (f", {ending}" if ending else "")
