"""The worth of caches as frontends write it, and as it is read whatever anybody wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.fleet.store_keys import worth_in, worth_text
from dynaplan.util.documents import MAX_WHOLE

IDS = st.integers(1, MAX_WHOLE)


@given(st.dictionaries(IDS, st.integers(1, 10**12), max_size=5))
def test_what_one_frontend_says_is_read(tokens: dict[int, int]) -> None:
    assert worth_in([worth_text(tokens)]) == tokens


def test_what_several_frontends_say_is_added_up() -> None:
    assert worth_in([worth_text({0xAB: 5, 2: 1}), worth_text({0xAB: 7}), "{}"]) == {0xAB: 12, 2: 1}


@pytest.mark.parametrize("text", ["", "[]", '{"1": -1}', '{"1": true}', '{"1": 1e9}', '{"worker": 1}', "\0"])
def test_a_worth_that_cannot_be_read_is_left_out(text: str) -> None:
    assert worth_in([text, worth_text({3: 4})]) == {3: 4}


@given(st.text(max_size=30))
def test_the_reader_is_total(text: str) -> None:
    assert all(isinstance(worker, int) for worker in worth_in([text]))
