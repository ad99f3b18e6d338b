"""GPUs that persons have taken from a deployment."""

from __future__ import annotations

import pytest

from dynaplan.fleet.holds import Hold, ReservedGpus, reserved_words
from dynaplan.util.durations import wall_clock

NOON_S = 1795435200.0
FOR_NOW = Hold(since_s=NOON_S, until_s=NOON_S + 3600, until="one o'clock", by="alice", uid=1000)
NIGHTS = Hold(at="22:00-06:00", zone="UTC")


def test_reservations_read_back_as_they_were_written() -> None:
    both = ReservedGpus({7: FOR_NOW, 0: NIGHTS})
    assert ReservedGpus.from_text(both.to_text()) == both
    assert list(both.to_json()) == ["0", "7"]
    assert ReservedGpus.from_text("") == ReservedGpus()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"seven": {}}', "expected the index of a GPU"),
        ('{"-1": {}}', "expected the index of a GPU"),
        ('{"7": 7}', "expected a JSON object"),
        ('{"7": {"by": 7}}', "'by' is 7"),
    ],
)
def test_what_is_no_reservation_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReservedGpus.from_text(text)


def test_a_gpu_is_reserved_until_the_deadline_or_while_its_hours_are_open() -> None:
    both = ReservedGpus({7: FOR_NOW, 0: NIGHTS})
    assert both.in_force(NOON_S, wall_clock) == {7: FOR_NOW}
    assert both.in_force(NOON_S + 11 * 3600, wall_clock) == {0: NIGHTS}
    assert both.lasting(NOON_S + 3600) == ReservedGpus({0: NIGHTS})


def test_gpus_are_reserved_and_given_back_one_by_one() -> None:
    both = ReservedGpus({0: NIGHTS}).with_gpus({7: FOR_NOW})
    assert both.without(frozenset({0, 3})) == ReservedGpus({7: FOR_NOW})


def test_they_say_their_maker_and_their_end() -> None:
    assert reserved_words(FOR_NOW) == "reserved by alice until one o'clock"
    assert reserved_words(NIGHTS) == "reserved at 22:00-06:00 (UTC)"
    assert list(ReservedGpus({7: FOR_NOW}).sentences) == ["GPU 7 was reserved by alice until one o'clock"]
