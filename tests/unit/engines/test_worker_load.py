from __future__ import annotations

import pytest

from dynaplan.engines.worker_load import WorkerLoad

LOAD = WorkerLoad(3, 8, 2, 40, 100, 0.4, 0.25)


def test_a_load_is_read_as_it_was_written() -> None:
    assert WorkerLoad.from_json(LOAD.to_json()) == LOAD


def test_the_flat_form_of_an_earlier_version_is_read() -> None:
    nested = LOAD.to_json()
    assert WorkerLoad.from_json({**nested["worker_stats"], **nested["kv_stats"]}) == LOAD


def test_a_field_that_is_missing_is_0() -> None:
    assert WorkerLoad.from_json({}) == WorkerLoad()


def test_a_field_that_is_no_number_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        WorkerLoad.from_json({"worker_stats": {"request_active_slots": "many"}})


def test_sleep_travels_only_where_there_is_some() -> None:
    awake, asleep = WorkerLoad(), WorkerLoad(is_asleep=True)
    assert "is_asleep" not in awake.to_json()["worker_stats"]
    assert WorkerLoad.from_json(asleep.to_json()) == asleep


def test_generated_tokens_travel_only_where_the_engine_tells_them() -> None:
    assert "generated_tokens" not in LOAD.to_json()["worker_stats"]
    told = WorkerLoad(generated_tokens=12)
    assert WorkerLoad.from_json(told.to_json()) == told
