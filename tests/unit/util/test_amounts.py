"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from dynaplan.util.amounts import GIB, bytes_of, gib, gib_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("500MB", 500 * 10**6),
        ("5 GiB", 5 * 2**30),
        ("1.5g", 1_500_000_000),
        ("2t", 2 * 10**12),
    ],
)
def test_an_amount_is_read_in_bytes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 apples", "1e9"])
def test_any_other_text_is_no_amount(text: str) -> None:
    assert bytes_of(text) is None


def test_memory_is_said_in_the_units_of_the_driver() -> None:
    assert (gib(13.4 * GIB), gib(98 * 2**20)) == ("13.4 GiB", "98 MiB")
    assert gib_of(76_235_669_504, 85_520_809_984) == "71 of 80 GiB"  # an H100 of 80 GB has 81,559 MiB
