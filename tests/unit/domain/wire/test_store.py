from __future__ import annotations

import pytest

from dynaplan.domain.wire.store import Deleted, KeyValue, Put, Snapshot, WatchEvent, values_after

KNOWN = {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("event", "values"),
    [
        (Put(KeyValue("b", "3", 9)), {"a": "1", "b": "3"}),
        (Put(KeyValue("c", "3", 9)), {"a": "1", "b": "2", "c": "3"}),
        (Deleted("a"), {"b": "2"}),
        (Deleted("never there"), KNOWN),
        (Snapshot((KeyValue("c", "3", 9),)), {"c": "3"}),
    ],
)
def test_the_values_follow_what_happens_to_the_keys(event: WatchEvent, values: dict[str, str]) -> None:
    assert values_after(KNOWN, event) == values
    assert KNOWN == {"a": "1", "b": "2"}
