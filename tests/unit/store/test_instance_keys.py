"""What is said of instances is read from keys that anybody may have written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.store.instance_keys import ASLEEP
from dynaplan.util.documents import MAX_WHOLE


@given(st.sets(st.integers(1, MAX_WHOLE), max_size=5))
def test_what_is_written_is_read(instances: set[int]) -> None:
    keys = [ASLEEP.key("ns", instance_id) for instance_id in instances]
    assert ASLEEP.instances("ns", keys) == instances


@given(st.text(max_size=20))
def test_a_key_that_ends_in_no_instance_id_is_left_out(end: str) -> None:
    for instance_id in ASLEEP.instances("ns", [ASLEEP.prefix("ns") + end]):
        assert 0 < instance_id <= MAX_WHOLE


def test_signs_words_and_numbers_beyond_a_lease_are_no_instance_ids() -> None:
    ends = ("", "-5", "+5", "0x5", "A", "5_5", "\u0663", "f" * 16, "f" * 5000, "word", "0", " 7")
    assert ASLEEP.instances("ns", [ASLEEP.prefix("ns") + end for end in ends]) == frozenset()
