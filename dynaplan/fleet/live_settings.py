"""Settings of remote prefill that are changed while requests flow: keys, decimal text, as in Dynamo 0.2.

``/{namespace}/disagg_router/{max_local_prefill_length, max_prefill_queue_size}``; a key that is deleted gives
the configured value back.
"""

from __future__ import annotations

from dynaplan.util.documents import whole_number

LIVE_SETTINGS = ("max_local_prefill_length", "max_prefill_queue_size")
"""The names of the settings; each is a number from 0 on."""


def live_settings_prefix(namespace: str) -> str:
    """Return the prefix of the keys of a namespace."""
    return f"/{namespace}/disagg_router/"


def live_setting(text: str) -> int | None:
    """Read a value; None when it is no whole number from 0 on."""
    found = whole_number(text)
    return None if found is None or found < 0 else found
