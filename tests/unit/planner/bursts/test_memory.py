"""The hedge's memory as it is written down."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.memory import (
    Decoding,
    ExpertTrial,
    Hedge,
    Lived,
    Missed,
    decoding_from_json,
    hedge_from_json,
    hedge_to_json,
)

TRIAL = ExpertTrial(
    Targets(2, 1),
    False,
    3.5,
    1.25,
    30.0,
    Decoding((1.5, 0.5), (20.0, 21.0), 0.25),
    60.0,
    30.0,
    900.0,
    Missed(4.0, 16.0, 2.0, 30.0),
    Missed(1.0, 1.0),
)
HEDGE = Hedge(
    trials=(TRIAL, ExpertTrial(Targets(1, 1))),
    followed=(Targets(1, 1), Targets(2, 1)),
    seconds=900.0,
    requests=120.0,
    leasts=(Targets(1, 1),),
    most=Targets(3, 1),
    newest=Targets(2, 1),
    newest_s=90.0,
    trusted=(Targets(2, 1), False),
    lived=Lived(TRIAL, 3.0, 2.0, ExpertTrial(Targets(0, 1), queue=5.0)),
)


def test_it_is_read_as_it_was_written_in_the_form_of_now_and_in_that_of_earlier_versions() -> None:
    for document in (hedge_to_json(HEDGE), asdict(HEDGE)):
        assert hedge_from_json(json.loads(json.dumps(document))) == HEDGE
    assert hedge_from_json({}) == Hedge()


def test_numbers_have_six_digits_and_what_is_less_than_a_millionth_is_nothing() -> None:
    long = Hedge(trials=(ExpertTrial(queue=1234567.891, held_gpu_s=1e-9, late=Missed(1 / 3)),))
    (read,) = hedge_from_json(hedge_to_json(long)).trials
    assert (read.queue, read.held_gpu_s, read.late.requests) == (1234570.0, 0.0, 0.333333)


def test_a_mere_number_that_decodes_is_nothing_that_goes_on() -> None:
    assert decoding_from_json(3.5) == Decoding()


@pytest.mark.parametrize(
    "broken", [{"trusted": [{}]}, {"trusted": [{}, True, True]}, {"trials": [[1]]}, {"trials": [5]}]
)
def test_what_is_no_memory_is_an_error_that_readers_of_records_know(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        hedge_from_json(broken)
