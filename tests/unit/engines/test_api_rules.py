"""The fields of a request are judged whatever they hold, and a fault names field, value and expectation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.engines import api_rules as rules
from dynaplan.engines.api_rules import EngineApi, FieldRule
from dynaplan.engines.llamacpp.request_fields import API as LLAMACPP_API

DEEP = json.loads('{"items":' * 200 + "1" + "}" * 200)

ACCEPTED: list[tuple[FieldRule, list[Any], list[Any]]] = [
    (rules.forbidden("why"), [], [1, "x", False]),
    (rules.boolean(), [True, False], [0, 1, "true"]),
    (rules.integer(0, 9), [0, 9], [-1, 10, 1.0, True, "1", 10**5000]),
    (rules.number(0, 1), [0, 1, 0.5], [-0.1, 2, True, "x", float("nan"), float("inf"), 10**400]),
    (rules.integer_or_boolean(0, 9), [True, 9], [10, "x"]),
    (rules.string(3), ["", "abc"], ["abcd", 5, ["a"]]),
    (rules.strings(2, 3), ["abc", [], ["a", "b"]], ["abcd", ["a"] * 3, ["abcd"], [5], 5]),
    (rules.integers(2), [[], [0, 2**31 - 1]], [[1, 2, 3], [-1], [2**31], [True], 5]),
    (rules.collection(1), [[], {}, [1], {"a": 1}], [[1, 2], {"a": 1, "b": 2}, "x"]),
    (
        rules.biases(2, 100),
        [{}, {"5": 100, "6": -0.5}, [[5, False], ["x", 1]], []],
        [
            {"5": float("inf")},
            {"5": "x"},
            {"5": 101},
            {"1": 0, "2": 0, "3": 0},
            [5],
            [[5]],
            [[5, float("nan")]],
            5,
        ],
    ),
    (rules.grammar(9, 2), ["", "((a))", ")((a))"], ["(((a)))", "x" * 10, 5]),
    (
        rules.schema(3, 9, 100),
        [{}, 5, {"maxItems": 100}, {"a": [{"b": 1}]}, {"maxLength": "x"}],
        [DEEP, list(range(9)), {"maxItems": 101}, {"a": {"minLength": 10**400}}, {"maxItems": float("nan")}],
    ),
]


@pytest.mark.parametrize(
    ("rule", "good", "bad"), ACCEPTED, ids=lambda each: getattr(each, "expected", "")[:30]
)
def test_a_rule_accepts_what_it_expects_and_nothing_else(
    rule: FieldRule, good: list[Any], bad: list[Any]
) -> None:
    assert all(map(rule.accepts, good))
    assert not any(map(rule.accepts, bad))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=20,
)


@given(anything)
def test_a_rule_judges_any_json(value: Any) -> None:
    for rule, _, _ in ACCEPTED:
        assert rule.accepts(value) in (True, False)


API = EngineApi({"n": rules.integer(1, 9)}, death_marks=("it is dead",))


def test_a_list_of_bounds_lets_every_other_field_through() -> None:
    assert API.fault({"n": 3, "seed": 1, "own": "x"}) is None
    assert API.fault({"n": None}) is None
    fault = API.fault({"n": 10})
    assert fault and (fault.name, fault.message) == ("n", "'n' is 10: expected a whole number from 1 to 9.")


def test_a_death_is_told_by_the_engines_words() -> None:
    assert API.reports_death("500: it is dead")
    assert not API.reports_death("it lives")
    assert not EngineApi().reports_death("it is dead")


def test_schemas_of_tools_lose_numbers_of_repetitions_that_are_too_large() -> None:
    """As Claude Code 2.1 sends them: a script of at most 524,288 characters."""
    text = {"type": "string", "maxLength": 524_288, "minLength": 1}
    tools = [
        {"name": "run", "input_schema": {"properties": {"script": text, "maxLength": {"type": "string"}}}}
    ]
    left = LLAMACPP_API.loosened_tools({"tools": tools}, "/v1/messages")["tools"]
    properties = left[0]["input_schema"]["properties"]
    assert properties == {"script": {"type": "string", "minLength": 1}, "maxLength": {"type": "string"}}
    assert LLAMACPP_API.fault({"tools": left}, "/v1/messages") is None
    assert LLAMACPP_API.loosened_tools({"tools": left}, "/v1/messages") == {}
