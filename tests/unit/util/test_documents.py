from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dynaplan.util.documents import (
    flag_field,
    number_field,
    object_field,
    parse_object,
    text_field,
    whole_field,
    whole_list_field,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "expected a JSON object"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": NaN}', "NaN, which is not JSON"),
        ("{", "delimiter|property name"),
    ],
)
def test_anything_but_a_json_object_is_a_value_error(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_object(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        (" -7 ", -7),
        ("", None),
        ("1.5", None),
        ("٣", None),
        ("9" * 30, None),
        ("9" * 19, None),
        ("7\x1f", 7),
    ],
)
def test_a_decimal_text_of_63_bits_is_a_whole_number(text: str, number: int | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (text_field, 7, "a text"),
        (whole_field, -1, "a whole number, at least 0"),
        (whole_field, True, "a whole number, at least 0"),
        (number_field, "1", "a number"),
        (number_field, True, "a number"),
        (number_field, 10**400, "a number that fits a float"),
        (number_field, float("inf"), "a finite number"),
        (flag_field, 1, "true or false"),
        (object_field, [], "a JSON object"),
        (whole_list_field, [1, "2"], "a list of whole numbers"),
        (whole_list_field, 7, "a list of whole numbers"),
    ],
)
def test_a_field_of_another_type_is_told_with_its_name_and_what_was_expected(
    read: Callable[[dict[str, Any], str], Any], value: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"'field' is .*: expected {expected}"):
        read({"field": value}, "field")


def test_a_missing_field_is_what_the_reader_names_for_it() -> None:
    assert text_field({}, "field", "t") == "t"
    assert whole_field({}, "field", 3) == 3
    assert number_field({}, "field", 1.5) == 1.5
    assert flag_field({}, "field", True) is True
    assert object_field({}, "field", {"a": 1}) == {"a": 1}
    assert whole_list_field({}, "field") == ()


def test_a_long_value_is_shown_in_60_characters() -> None:
    with pytest.raises(ValueError) as caught:
        whole_field({"field": {"a": "x" * 500}}, "field")
    assert "..." in str(caught.value)
    assert len(str(caught.value)) < 130
