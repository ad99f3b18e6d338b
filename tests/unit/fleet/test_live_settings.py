"""The settings that are changed while requests flow."""

from __future__ import annotations

import pytest

from dynaplan.fleet.store_keys import LIVE_SETTINGS, live_setting, live_settings_prefix


def test_the_keys_are_those_of_the_original() -> None:
    keys = [live_settings_prefix("ns") + name for name in LIVE_SETTINGS]
    assert keys == ["/ns/disagg_router/max_local_prefill_length", "/ns/disagg_router/max_prefill_queue_size"]


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("1000", 1000), ("-1", None), ("", None), ("ten", None), ("1.5", None)]
)
def test_a_value_is_a_whole_number_from_0_on(text: str, number: int | None) -> None:
    assert live_setting(text) == number
