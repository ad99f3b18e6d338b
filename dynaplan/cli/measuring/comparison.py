"""The report of a measurement: the columns of ``simulate``, and what there is to say beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dynaplan.lab.simulate.table import rows
from dynaplan.simulation.run import Result

if TYPE_CHECKING:
    from dynaplan.cli.measuring.fleet_watch import FleetWatch
    from dynaplan.cli.measuring.running import Measured

MEASURED, SIMULATED = "measured", "simulated"
"""The names of the two rows, in the first column."""

BUSY_CLIENT = 0.7
"""The part of a core from which on a client may read tokens later than they came."""

LATE_S = 0.02
"""Seconds by which a request may be sent after it was due before that is told."""


def table(measured: Measured, fleet: FleetWatch | None, foretold: Result | None) -> list[dict[str, Any]]:
    """Return the measured row and the simulated one; None for what cannot be seen from outside."""
    tally = measured.tally
    changes = fleet.changes() if fleet else None
    result = Result(
        MEASURED,
        tally.outcome,
        fleet.gpu_s / 3600 if fleet else 0.0,
        measured.sending_s,
        measured.sending_s,
        changes.scale_events if changes else 0,
        changes.flaps if changes else 0,
    )
    first, *others = rows([result, foretold] if foretold else [result])
    unseen = ["queued_p95_ms", "imbalance", *([] if fleet else ["gpu_hours", "scale_events", "flaps"])]
    first |= dict.fromkeys(unseen) | {"model": measured.model, **tally.document()}
    # A decode worker counts what a prefill worker has handed over as cached: that is no hit.
    if fleet is None or fleet.is_disaggregated or not tally.outcome.cached_tokens:
        first["hit_rate"] = None
    return [first, *({**each, "policy": SIMULATED, "simulated_policy": each["policy"]} for each in others)]


def notes(measured: Measured, asked: tuple[int, int] | None) -> Iterator[str]:
    """Yield a sentence for each thing that a reader of the table must know.

    ``asked`` are the tokens of each prompt and answer, None for a trace.
    """
    tally = measured.tally
    for kind, number in tally.failures.most_common():
        yield f"failed: {number} x {kind}: {tally.examples[kind]}"
    if tally.open:
        yield f"{len(tally.open)} requests were open when it was ended, and are not counted."
    if tally.other_answers:
        yield (
            f"{tally.other_answers} answers had another number of tokens than was asked for: this engine "
            "does not heed ignore_eos, so that they compare badly with the simulation."
        )
    if tally.other_prompts and asked:
        yield f"{tally.other_prompts} prompts count as another number of tokens than {asked[0]} there."
    if measured.client_load > BUSY_CLIENT:
        yield (
            f"This client took {measured.client_load:.0%} of a core: its times may be longer than they were. "
            "Send less, or measure from several clients."
        )
    if tally.late_s > LATE_S:
        yield (
            f"A request was sent {tally.late_s * 1000:.0f} ms after it was due; its latency counts "
            "from when it was due."
        )
