"""Caps on the power of GPUs, as they are written, and which of them hold."""

from __future__ import annotations

import pytest

from dynaplan.contract.power_caps import PowerCap, cap_at, parse_power_cap


def test_a_cap_is_watts_all_day_or_at_hours_of_the_day() -> None:
    assert parse_power_cap("250W") == PowerCap(250.0)
    night = parse_power_cap(" 22:00-07:00=300 w")
    assert (night.watts, str(night.hours)) == (300.0, "22:00-07:00")


@pytest.mark.parametrize(
    "text", ["", "250", "0W", "-5W", "2.5W", "22:00=250W", "22:00-07:00", "7-8=250W", "25:00-26:00=250W"]
)
def test_what_is_no_cap_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|begins"):
        parse_power_cap(text)


def test_the_least_of_the_caps_that_hold_counts() -> None:
    caps = [parse_power_cap(each) for each in ("500W", "22:00-07:00=250W", "06:00-08:00=300W")]

    def at(hour: int) -> float | None:
        return cap_at(caps, 0.0, lambda _: hour * 60)

    assert [at(hour) for hour in (12, 22, 6, 7)] == [500.0, 250.0, 250.0, 300.0]
    assert cap_at(caps[1:], 0.0, lambda _: 720) is None
