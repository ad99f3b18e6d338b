"""The words for what a person changes by a command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.by_hand import record_scaling
from dynaplan.cli.scale_counts import WrittenCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.recorders.manual_changes import manual_changes

FREE = RoleHolds()
HELD = FREE.replaced(Role.DECODE, Hold(2, 2, by="alice"))


@pytest.mark.parametrize(
    ("asked", "holds_before", "holds", "what"),
    [
        ({Role.DECODE: 2}, FREE, FREE, "decode 4 -> 2"),
        ({Role.DECODE: 4}, FREE, FREE, "decode 4 again"),
        ({Role.DECODE: 2}, FREE, HELD, "decode 4 -> 2, held at 2 until `dynaplan release`"),
        ({}, HELD, FREE, "decode released, it was held at 2 by alice until `dynaplan release`"),
        ({Role.PREFILL: 1, Role.DECODE: 3}, HELD, HELD, "prefill 1 again, decode 4 -> 3"),
    ],
)
def test_a_scaling_says_from_where_to_where_and_what_is_held(
    tmp_path: Path, asked: dict[Role, int], holds_before: RoleHolds, holds: RoleHolds, what: str
) -> None:
    found: Any = SimpleNamespace(log_dir=tmp_path)
    before = DesiredCounts(num_prefill_workers=1, num_decode_workers=4)
    written = WrittenCounts(7, asked, before, holds, before, holds_before)
    record_scaling(found, list(asked) or [Role.DECODE], written)
    [change] = manual_changes(tmp_path, 5)
    assert change.what == what
    assert change.after == {role.value: number for role, number in asked.items()}
    assert change.before == {role.value: before.of(role) for role in asked}


def test_a_release_of_what_was_not_held_is_no_change(tmp_path: Path) -> None:
    found: Any = SimpleNamespace(log_dir=tmp_path)
    counts = DesiredCounts(num_decode_workers=4)
    record_scaling(found, [Role.DECODE], WrittenCounts(7, {}, counts, FREE, counts, FREE))
    assert manual_changes(tmp_path, 5) == []
