"""What the environment says of events."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.events import is_nats_wanted, is_original, max_age_s
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "is_wanted"),
    [({}, False), ({"NATS_SERVER": "nats://x"}, False), ({"DYN_EVENT_PLANE": " NATS "}, True)],
)
def test_a_nats_server_for_events_is_asked_for(environ: dict[str, str], is_wanted: bool) -> None:
    assert is_nats_wanted(environ) is is_wanted


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"DYN_EVENT_PLANE": "zmq"}, "DYN_EVENT_PLANE is 'zmq': events travel over NATS alone"),
        ({"DYN_NATS_STREAM_MAX_AGE": "1h"}, "DYN_NATS_STREAM_MAX_AGE is '1h'"),
        ({"DYN_NATS_STREAM_MAX_AGE": "0"}, "is '0'"),
        ({"DYN_NATS_STREAM_MAX_AGE": "nan"}, "is 'nan'"),
        ({"DYNAPLAN_COMPAT": "dynamite"}, "DYNAPLAN_COMPAT is 'dynamite'"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        is_nats_wanted(environ)


def test_events_are_kept_for_an_hour_unless_it_is_said() -> None:
    assert [max_age_s({}), max_age_s({"DYN_NATS_STREAM_MAX_AGE": "60"})] == [3600.0, 60.0]


def test_the_originals_form_is_asked_for() -> None:
    assert [is_original({}), is_original({"DYNAPLAN_COMPAT": "Dynamo"})] == [False, True]
