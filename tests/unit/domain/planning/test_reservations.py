"""GPUs that persons have taken from a deployment."""

from __future__ import annotations

from datetime import UTC

import pytest

from dynaplan.domain.planning.holds import Hold
from dynaplan.domain.planning.reservations import Reservations, reserved_words

NOON_S = 1795435200.0
FOR_NOW = Hold(since_s=NOON_S, until_s=NOON_S + 3600, until="one o'clock", by="alice", uid=1000)
NIGHTS = Hold(at="22:00-06:00", zone="UTC")


def test_they_read_back_as_they_were_written() -> None:
    both = Reservations({7: FOR_NOW, 0: NIGHTS})
    assert Reservations.from_text(both.to_text()) == both
    assert list(both.to_json()) == ["0", "7"]
    assert Reservations.from_text("") == Reservations()


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
        Reservations.from_text(text)


def test_a_gpu_is_reserved_until_the_deadline_or_while_its_hours_are_open() -> None:
    both = Reservations({7: FOR_NOW, 0: NIGHTS})
    assert both.in_force(NOON_S, lambda name: UTC) == {7: FOR_NOW}
    assert both.in_force(NOON_S + 11 * 3600, lambda name: UTC) == {0: NIGHTS}
    assert both.lasting(NOON_S + 3600) == Reservations({0: NIGHTS})


def test_gpus_are_reserved_and_given_back_one_by_one() -> None:
    both = Reservations({0: NIGHTS}).with_gpus({7: FOR_NOW})
    assert both.without(frozenset({0, 3})) == Reservations({7: FOR_NOW})


def test_they_say_their_maker_and_their_end() -> None:
    assert reserved_words(FOR_NOW) == "reserved by alice until one o'clock"
    assert reserved_words(NIGHTS) == "reserved at 22:00-06:00 (UTC)"
    assert list(Reservations({7: FOR_NOW}).sentences) == ["GPU 7 was reserved by alice until one o'clock"]
