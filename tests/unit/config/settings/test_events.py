"""The event plane that the environment names."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.events import checked_event_plane, event_plane, is_original, max_age_s
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "plane"),
    [
        ({}, "zmq"),
        ({"NATS_SERVER": ""}, "zmq"),
        ({"NATS_SERVER": "nats://x"}, "nats"),
        ({"NATS_SERVER": "nats://x", "DYN_EVENT_PLANE": " ZMQ "}, "zmq"),
        ({"DYN_EVENT_PLANE": "nats"}, "nats"),
    ],
)
def test_events_travel_by_nats_where_there_is_one_unless_it_is_said(
    environ: dict[str, str], plane: str
) -> None:
    assert event_plane(environ) == plane
    assert checked_event_plane(environ) == plane


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"DYN_EVENT_PLANE": "nat"}, "DYN_EVENT_PLANE is 'nat'"),
        ({"DYN_NATS_STREAM_MAX_AGE": "1h"}, "DYN_NATS_STREAM_MAX_AGE is '1h'"),
        ({"DYN_NATS_STREAM_MAX_AGE": "0"}, "is '0'"),
        ({"DYN_NATS_STREAM_MAX_AGE": "nan"}, "is 'nan'"),
        ({"DYNAPLAN_COMPAT": "dynamite"}, "DYNAPLAN_COMPAT is 'dynamite'"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        checked_event_plane(environ)


def test_events_are_kept_for_an_hour_unless_it_is_said() -> None:
    assert [max_age_s({}), max_age_s({"DYN_NATS_STREAM_MAX_AGE": "60"})] == [3600.0, 60.0]


def test_the_originals_form_is_asked_for() -> None:
    assert [is_original({}), is_original({"DYNAPLAN_COMPAT": "Dynamo"})] == [False, True]
