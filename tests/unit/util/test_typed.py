"""What was read into dataclasses is of the annotated types, or named by its field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynaplan.util.documents import check_types


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
