"""``dynaplan doctor``: what this box has and lacks for a deployment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynaplan.util import screen
from dynaplan.util.tables import fold

if TYPE_CHECKING:
    from dynaplan.cli.box.findings import Finding


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(as_json: bool) -> int:
    """Say what this box has and lacks, and what to do next about each. Starts and changes nothing.

    The exit code is 1 when `dynaplan serve` cannot work here, else 0.
    """
    from dynaplan.cli.box.findings import Level, findings

    found = tuple(findings())
    if as_json:
        rows = [{"level": each.level.value, **_plain(each)} for each in found]
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(page(found, screen.width()))
    return int(any(each.level is Level.FAULT for each in found))


def _plain(finding: Finding) -> dict[str, str]:
    return {"topic": finding.topic, "says": finding.says, "advice": finding.advice}


def page(found: Sequence[Finding], width: int) -> str:
    """Return the findings as lines, what to do next below each, and their numbers."""
    from dynaplan.cli.box.findings import Level

    wide = max((len(each.topic) for each in found), default=0)
    indent = " " * (6 + wide + 2)
    paint = {Level.OK: screen.good, Level.WARNING: screen.warning, Level.FAULT: screen.error}
    lines = []
    for each in found:
        mark = paint.get(each.level, str)(each.level.value) + " " * (6 - len(each.level.value))
        text = fold(f"{each.topic.ljust(wide)}  {each.says}", max(0, width - 6), indent[6:])
        lines.append(mark + text.replace("\n", "\n      "))
        if each.advice:
            lines.append(fold(f"{indent}-> {each.advice}", width, f"{indent}   "))
    faults, warnings = (sum(each.level is level for each in found) for level in (Level.FAULT, Level.WARNING))
    last = (
        f"`dynaplan serve` cannot work here: {faults} to mend" if faults else "`dynaplan serve` can work here"
    )
    lines += ["", f"{last}; {warnings} warnings."]
    return "\n".join(lines)
