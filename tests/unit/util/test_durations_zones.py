"""The time zone of this machine."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

import pytest

from dynaplan.util import durations
from dynaplan.util.durations import local_zone_name, moment, wall_clock, zone_of


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
