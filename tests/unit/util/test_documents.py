""""""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynaplan.util.documents import (
    check_types,
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


@dataclass(frozen=True)
class Inner:
    number: float = 0.0


@dataclass(frozen=True)
class Outer:
    count: int = 0
    usage: float | None = None
    text: str = ""
    is_on: bool = False
    inner: Inner = field(default_factory=Inner)
    inners: tuple[Inner, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    anything: Any = None
    pair: tuple[Inner, bool] | None = None


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"count": 2**63 - 1, "usage": 5, "is_on": True, "texts": {"a": "b"}, "anything": object()},
        {"usage": math.inf, "inners": (Inner(), Inner(1)), "pair": (Inner(), True)},
    ],
)
def test_what_is_of_the_annotated_types_does_not_raise(good: dict[str, Any]) -> None:
    check_types(Outer(**good))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"count": True}, "Outer.count is True"),
        ({"count": 1.0}, "Outer.count is 1.0"),
        ({"count": 10**40}, "Outer.count is 1000"),
        ({"usage": "5"}, "Outer.usage is '5'"),
        ({"usage": math.nan}, "Outer.usage is nan"),
        ({"text": None}, "Outer.text is None"),
        ({"is_on": 1}, "Outer.is_on is 1"),
        ({"inner": {}}, "Outer.inner is {}"),
        ({"inner": Inner("x")}, "Inner.number is 'x'"),  # type: ignore[arg-type]
        ({"inners": [Inner()]}, "Outer.inners is "),
        ({"inners": (Inner(), 5)}, "Outer.inners is "),
        ({"texts": []}, "Outer.texts is "),
        ({"pair": (Inner(), Inner())}, "Outer.pair is "),
        ({"pair": (Inner(), True, True)}, "Outer.pair is "),
    ],
)
def test_a_value_of_another_type_is_named_by_its_field(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_types(Outer(**bad))
    assert str(caught.value).startswith(said)
