"""``dynaplan replay --gate``: recorded and new options side by side, and an exit code for CI."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dynaplan.foundation import screen
from dynaplan.foundation.tables import folded, text_table


def pass_gate(
    decisions: Path, options: Mapping[str, Any], may_lose: float, may_cost: float, *, is_json: bool
) -> None:
    """Print how the recorded and the new options would have fared; exit 1 when the new ones did worse.

    Worse is to lose more than ``may_lose`` points of attainment, or to cost more than ``may_cost`` per cent
    more GPU hours without gaining more than that.
    """
    from dynaplan.core.shadowing.score_card import Difference, Tolerances, card_rows, verdict
    from dynaplan.planner.gate import compare

    compared, within = compare(decisions, options), Tolerances(may_lose, may_cost)
    is_worse = Difference.between(compared.old, compared.new).is_worse(within)
    if is_json:
        click.echo(json.dumps({**asdict(compared), "is_worse": is_worse}))
    else:
        scores = {"as it was": compared.served, "recorded options": compared.old, "new options": compared.new}
        click.echo(f"{compared.intervals} intervals, {compared.served.requests:.0f} requests, by the model")
        click.echo(text_table(card_rows(scores), width=screen.width()))
        told = verdict("The new options", compared.old, compared.new, within)
        click.echo(folded(told, screen.width()))
    if is_worse:
        sys.exit(1)
