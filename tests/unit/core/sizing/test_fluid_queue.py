"""A queue of prompts as a fluid."""

from __future__ import annotations

import pytest

from dynaplan.core.sizing.fluid import queued


@pytest.mark.parametrize(
    ("load", "arrived", "after", "late"),
    [
        (0.0, 5.0, 0.0, 0.0),
        (0.0, 20.0, 10.0, 0.5),
        (10.0, 10.0, 10.0, 1.0),
        (10.0, 0.0, 0.0, 0.5),
    ],
)
def test_a_queue_grows_by_what_its_workers_do_not_compute_and_the_part_beyond_the_room_is_late(
    load, arrived, after, late
):
    assert queued(load, arrived, pull_s=1.0, per_s=10.0, room_s=0.5) == (after, late)
