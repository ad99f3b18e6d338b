"""Options as fields: what is read, what is refused, and what derives from a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from dynaplan.config.settings.fields import Options, Settings, option, options_of
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class Section(Settings):
    SECTION: ClassVar[str] = "Section"

    wait_s: float = option(15.0, "Seconds to wait", minimum=0, maximum=60)
    mode: str = option("fast", "How", choices=("fast", "very-fast"))
    is_on: bool = option(False, "Whether", name="enable")
    extra: dict[str, Any] | None = option(None, "Anything")
    depth: int = option(2, "How deep", minimum=0)
    found_out: str = ""


KNOWN: Options = options_of(Section)


def test_the_field_says_key_type_default_and_bounds() -> None:
    assert list(KNOWN) == ["wait", "mode", "enable", "extra", "depth"]
    assert (KNOWN["wait"].kind, KNOWN["wait"].default) == (float, 15.0)
    assert KNOWN["wait"].expected == "a number, 0 or more, 60 or less"
    assert KNOWN["mode"].help == "How: fast, very-fast  [default: fast]"


def test_values_are_read_into_the_section_in_either_spelling() -> None:
    settings = Section.from_options({"wait": 3, "mode": "very_fast", "depth": 5, "extra": None})
    assert (settings.wait_s, settings.mode, settings.depth) == (3.0, "very-fast", 5)
    assert isinstance(settings.wait_s, float)
    assert not settings.is_on


@pytest.mark.parametrize(
    ("key", "value"),
    [("wait", 61), ("wait", "3"), ("wait", True), ("wait", 10**400), ("mode", ["fast"]), ("depth", 1.0)],
)
def test_a_wrong_value_is_named_with_its_place(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"Section.{key} is .*\n  Expected .*\."):
        Section.from_options({key: value})
    with pytest.raises(ConfigError, match=r"Section.Common.x is"):
        Section.from_options({key: value}, {key: "Common.x"})


def test_an_unknown_key_of_a_section_is_refused_and_one_of_a_larger_section_is_not() -> None:
    with pytest.raises(ConfigError, match=r"Section has no option 'wiat'\n.*Did you mean 'wait'"):
        Section.from_options({"wiat": 1})
    assert Numbers.from_options({"wait": 1}) == Numbers()


def test_what_is_set_is_given_back_by_key() -> None:
    assert Numbers(7).to_options() == {"count": 7, "loud": False}


@dataclass(frozen=True)
class Numbers(Settings):
    count: int = option(1, "How many", minimum=1)
    is_loud: bool = option(False, "Whether", name="loud")


@pytest.mark.parametrize("text", ["4", "4.0", 4.0])
def test_a_number_may_come_as_text_where_that_is_asked_for(text: object) -> None:
    known = options_of(Numbers)
    assert (known["count"].read(text, is_text=True), known["loud"].read("true", is_text=True)) == (4, True)
    with pytest.raises(ConfigError, match=r"count is .*\n  Expected a whole number, 1 or more\."):
        Numbers.from_options({"count": text})


@pytest.mark.parametrize("text", ["", "many", "4.5", "nan", "inf", "1e999"])
def test_text_that_says_no_number_is_refused(text: str) -> None:
    assert options_of(Numbers)["count"].read(text, is_text=True) is None


def test_an_empty_text_is_a_value_only_where_nothing_or_an_empty_text_is_the_default() -> None:
    @dataclass(frozen=True)
    class Texts(Settings):
        key: str = option("", "Key")
        file: str | None = option(None, "File")
        host: str = option("here", "Host")

    assert Texts.from_options({"key": "", "file": ""}) == Texts("", "")
    for options in ({"host": ""}, {"file": " "}):
        with pytest.raises(ConfigError, match="Expected text"):
            Texts.from_options(options)


@dataclass(frozen=True)
class Odd(Settings):
    SECTION: ClassVar[str] = "Odd"

    seed: Any = option(0, "Seed", kind=int)


def test_a_declared_kind_counts_before_the_annotation() -> None:
    assert options_of(Odd)["seed"].kind is int
