from __future__ import annotations

from typing import Any

import pytest

from dynaplan.fleet.counts import FleetCounts, WorkerCounts
from dynaplan.planner.model import Observation


def test_a_published_fleet_is_read() -> None:
    document = {
        "roles": {
            "prefill": {"ready": 2, "draining": 1},
            "decode": {"starting": 1, "failed": 3, "asleep": 2, "else": 9},
        },
        "gpus_per_worker": {"prefill": 0.5, "decode": 2},
        "startup_s": {"decode": 40.5},
        "gpus_total": 8,
    }
    assert FleetCounts.from_json(document) == FleetCounts(
        prefill=WorkerCounts(ready=2, draining=1, gpus=0.5),
        decode=WorkerCounts(starting=1, failed=3, asleep=2, gpus=2.0, startup_s=40.5),
        gpus_total=8,
    )


def test_sleeping_workers_are_there_and_hold_their_gpus() -> None:
    counts = WorkerCounts(ready=1, asleep=2, failed=1, draining=1)
    assert (counts.holding, counts.present) == (3, 4)


def test_sleeping_workers_are_in_a_record_only_where_there_are_any() -> None:
    fleet = FleetCounts(decode=WorkerCounts(asleep=2))
    document = Observation(0.0, fleet).to_json()
    assert document["fleet"]["decode"]["asleep"] == 2
    assert "asleep" not in document["fleet"]["prefill"]
    assert Observation.from_json(document).fleet == fleet


def test_numbers_below_0_are_0() -> None:
    document = {"roles": {"decode": {"ready": -1}}, "gpus_total": -8, "gpus_per_worker": {"decode": -1}}
    assert FleetCounts.from_json(document) == FleetCounts()


@pytest.mark.parametrize(
    "document", [{"roles": []}, {"roles": {"decode": {"ready": "two"}}}, {"gpus_total": None}]
)
def test_anything_but_a_fleet_is_a_value_error(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        FleetCounts.from_json(document)


def test_a_published_fleet_is_read_back_as_it_was() -> None:
    prefill = WorkerCounts(ready=1, asleep=1, gpus=2.0, startup_s=40.0, unmanaged=1)
    fleet = FleetCounts(prefill, WorkerCounts(starting=1, draining=2, backoff=1, failed=1), 8)
    assert FleetCounts.from_json(fleet.to_json()) == fleet
