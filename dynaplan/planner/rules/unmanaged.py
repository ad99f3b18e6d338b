"""Workers that nobody manages: they take their part of the traffic, and the desired counts are of the others.

A size is one of all workers. So what is managed is counted together with the rest before sizing, and the rest
is taken off afterwards.
"""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.counts import FleetCounts, Targets
from dynaplan.planner.model.sizing import Sizing, WorkerLimits
from dynaplan.planner.model.targets import Step

NONE = Targets()


def unmanaged_in(fleet: FleetCounts, current: Targets) -> Targets:
    """Return the unmanaged workers; those of prefill count only where prefill is a pool of its own."""
    return Targets(fleet.prefill.unmanaged if current.prefill else 0, fleet.decode.unmanaged)


def together(managed: Targets, alone: Targets) -> Targets:
    """Return the numbers of managed and unmanaged workers together."""
    return Targets(managed.prefill + alone.prefill, managed.decode + alone.decode)


def limits_together(limits: WorkerLimits, alone: Targets) -> WorkerLimits:
    """Return the limits of all workers, from those of the managed ones: they hold for these alone."""
    if alone == NONE:
        return limits
    return replace(
        limits,
        max_gpus=limits.max_gpus + limits.gpus(alone),
        least=together(limits.least, alone),
        most=together(limits.most, alone),
    )


def managed_part(sizing: Sizing, alone: Targets) -> Sizing:
    """Return the size, and its steps, in managed workers, with a last step that says so."""
    if alone == NONE:
        return sizing
    steps = [
        replace(step, before=_without(step.before, alone), after=_without(step.after, alone))
        for step in sizing.steps
    ]
    targets = _without(sizing.targets, alone)
    why = f"unmanaged workers serve too ({alone}): {together(targets, alone)} in all"
    return replace(sizing, targets=targets, steps=(*steps, Step("unmanaged", targets, targets, why)))


def _without(workers: Targets, alone: Targets) -> Targets:
    return Targets(max(0, workers.prefill - alone.prefill), max(0, workers.decode - alone.decode))
