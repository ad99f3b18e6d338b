"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from dynaplan.util.amounts import bytes_of


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
