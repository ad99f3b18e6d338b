"""``--Service.key=value`` in all its spellings, and what a value is."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.config.overrides import (
    deep_merge,
    merge_sections,
    parse_overrides,
    split_overrides,
    typed_value,
)
from dynaplan.util.errors import ConfigError


@pytest.mark.parametrize(
    "spelling",
    [
        ["--Svc.key=v"],
        ["--Svc.key", "v"],
        ["--Svc.key", "=", "v"],
        ["--Svc.key", "=v"],
    ],
)
def test_every_spelling_is_an_override_and_leaves_the_rest(spelling: list[str]) -> None:
    overrides, rest = split_overrides(["graph:X", "-f", "a.yaml", *spelling, "--dry-run"])
    assert overrides == ["--Svc.key=v"]
    assert rest == ["graph:X", "-f", "a.yaml", "--dry-run"]
    assert parse_overrides(spelling) == {"Svc": {"key": "v"}}


@pytest.mark.parametrize(
    "argument",
    ["foo.bar", "--config-file=a.yaml", "./graphs/agg.py:Frontend", "--port", "-f", "--=.", "-a.b=1"],
)
def test_what_is_not_an_override_is_left_to_the_command_line(argument: str) -> None:
    assert split_overrides([argument, "1"]) == ([], [argument, "1"])


def test_nothing_after_two_dashes_is_an_override() -> None:
    assert split_overrides(["--", "--Svc.key=1"]) == ([], ["--", "--Svc.key=1"])


def test_a_negative_number_is_a_value_and_another_option_is_not() -> None:
    assert parse_overrides(["--Svc.a", "-1", "--Svc.b=-2.5", "--Svc.c", "-.5"]) == {
        "Svc": {"a": -1, "b": -2.5, "c": -0.5}
    }
    assert parse_overrides(["--Svc.a=-x"]) == {"Svc": {"a": "-x"}}
    for following in (["--Other.b=1"], ["-f", "x"], [], ["="]):
        with pytest.raises(ConfigError, match=r"Error parsing service arg: --Svc\.a"):
            split_overrides(["--Svc.a", *following])


@pytest.mark.parametrize("argument", ["foo.bar", "--A=1", "x", "--A"])
def test_anything_else_is_an_error_not_an_endless_loop(argument: str) -> None:
    with pytest.raises(ConfigError, match="not an option of a service"):
        parse_overrides([argument])


@pytest.mark.parametrize("argument", ["--A.=1", "--A..b=1", "--A.b.=1"])
def test_an_empty_key_is_an_error(argument: str) -> None:
    with pytest.raises(ConfigError, match="Error parsing service arg"):
        parse_overrides([argument])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7), ("007", 7), ("-1", -1), ("-007", -7), ("1e3", 1000.0), ("1.50", 1.5), (".5", 0.5),
        ("5.", 5.0), ("null", None), ('"7"', "7"), ("", ""), ("[1,2]", [1, 2]), ('{"a":1}', {"a": 1}),
        ("a=b", "a=b"),
        ("True", True), ("FALSE", False), ("true", True), ("1.2.3", "1.2.3"), ("²", "²"), ("NaN", "NaN"),
        ("meta/Llama-3.1-8B", "meta/Llama-3.1-8B"), ("[" * 5_000, "[" * 5_000),
    ],
)  # fmt: skip
def test_a_value_is_typed_as_the_original_types_it(text: str, value: Any) -> None:
    found = typed_value(["Svc", "key"], text)
    assert found == value
    assert type(found) is type(value)


def test_environment_variables_are_always_text() -> None:
    config = parse_overrides(["--Svc.ServiceArgs.envs.A=1", "--Svc.ServiceArgs.workers=1"])
    assert config == {"Svc": {"ServiceArgs": {"envs": {"A": "1"}, "workers": 1}}}


@given(st.text(), st.text())
def test_the_parser_does_not_raise_anything_but_its_own_error(name: str, value: str) -> None:
    try:
        parse_overrides([f"--{name}", value])
    except ConfigError:
        pass


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans()))
def test_a_number_or_flag_keeps_its_value_through_text(value: Any) -> None:
    found = typed_value(["S", "k"], str(value))
    assert found == value or math.isclose(found, value)


def test_merging_is_deep_at_every_level() -> None:
    below = {"A": {"ServiceArgs": {"workers": 1, "resources": {"gpu": 2}}, "model": "m"}}
    above = parse_overrides(["--A.ServiceArgs.workers=3", "--B.x=1"])
    assert merge_sections(below, above) == {
        "A": {"ServiceArgs": {"workers": 3, "resources": {"gpu": 2}}, "model": "m"},
        "B": {"x": 1},
    }
    assert below["A"]["ServiceArgs"]["workers"] == 1


def test_both_spellings_of_an_option_are_one_option() -> None:
    merged = merge_sections({"F": {"served_model_name": "a"}}, {"F": {"served-model-name": "b"}})
    assert merged == {"F": {"served_model_name": "b"}}


def test_a_value_takes_the_place_of_a_mapping_and_a_mapping_that_of_a_value() -> None:
    assert deep_merge({"a": {"b": 1}, "c": 2}, {"a": 3, "c": {"d": 4}}) == {"a": 3, "c": {"d": 4}}
