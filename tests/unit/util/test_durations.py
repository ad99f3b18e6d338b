"""Durations: read from a command line, and shown."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

import pytest

from dynaplan.util import durations
from dynaplan.util.amounts import seconds_of
from dynaplan.util.durations import clock, local_zone_name, moment, wall_clock, zone_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("1h30m", 5400),
        (" 2H ", 7200),
        ("0s", 0),
        ("1d2h3m4s", 93784),
    ],
)
def test_a_duration_is_read(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "2", "h", "-2h", "1.5h", "2 h", "30m1h", "²h", "9999999999s", "2w", "nan"]
)
def test_any_other_text_is_no_duration(text: str) -> None:
    assert seconds_of(text) is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "00:00"), (-5, "00:00"), (63.9, "01:03"), (3723, "1:02:03"), (90_000, "1 d 1:00:00")],
)
def test_a_time_is_shown_as_a_clock_shows_it(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_a_zone_is_found_by_its_name() -> None:
    assert zone_of("UTC") is zone_of("Etc/UTC") is UTC
    assert str(zone_of("Europe/Berlin")) == "Europe/Berlin"


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../../etc/passwd", "CET-1CEST"])
def test_a_zone_that_is_not_known_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="is not known here"):
        zone_of(name)


def test_the_variable_comes_first_then_the_machine_then_utc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TZ", ":Europe/Berlin")
    assert local_zone_name() == "Europe/Berlin"
    monkeypatch.delenv("TZ")
    database = tmp_path / "zoneinfo" / "posix" / "Europe"
    database.mkdir(parents=True)
    (database / "Berlin").touch()
    link = tmp_path / "localtime"
    monkeypatch.setattr(durations, "LOCAL_TIME", link)
    assert local_zone_name() == "UTC"
    link.symlink_to(database / "Berlin")
    assert local_zone_name() == "Europe/Berlin"
    link.unlink()
    link.write_bytes(b"rules without a name")
    with pytest.raises(ValueError, match="does not tell the name"):
        local_zone_name()


def test_the_clock_of_a_zone_tells_the_minute_and_a_moment_is_written_with_its_zone() -> None:
    noon_s = 1795435200.0  # Monday 2026-11-23, 12:00 UTC
    assert wall_clock("UTC")(noon_s) == 720
    assert wall_clock("Asia/Kathmandu")(noon_s + 43200) == 345
    assert moment(noon_s, "Europe/Berlin") == "Mon 2026-11-23 13:00 +0100"
