"""Options: each one is a field of a frozen dataclass, declared once by ``option()``.

A section of a configuration is such a dataclass. Its keys, their types, bounds and defaults, the names that
engines have for them, the flags of a command and the tables of the guide all derive from its fields.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from dynaplan.util.amounts import bytes_of, seconds_of, unit_missing
from dynaplan.util.documents import shown
from dynaplan.util.errors import ConfigError, all_faults, nearest

NO_EFFECT = "Of the original; has no effect"
UNITS = ("_ms", "_s", "_tokens")
"""Units that fields' names end with. Users leave them out."""

MAX_NUMBER = 1e300
"""The largest number that an option takes: one that a float holds."""


class Duration(float):
    """The kind of an option that is a time: seconds, or a text such as ``30m``; it is read as seconds."""


class Size(int):
    """The kind of an option that is an amount of memory: bytes, or a text such as ``5GB``; read as bytes."""


class Texts(list[str]):
    """The kind of an option that is a list of short texts, or one text with commas between them."""


OFF = "off"
"""The choice of an option that does nothing."""

READ, WRITTEN = "read", "written"
"""The values of ``path``: a file or directory that is read (or the name of a shipped one), or written."""

FUNCTION = re.compile(r"[^:\s]+:[A-Za-z_]\w*")
"""A function of the user's, as a graph is named: ``my_package.module:function`` or ``file.py:function``."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})

REAL_ENGINES = ("every engine but the simulated one",)
"""As ``must_match``: the engines themselves are not known here."""


class Option(NamedTuple):
    """One option: its key, type, bounds, default and meaning, and what engines make of it.

    - ``name`` is its key in kebab-case, ``kind`` the type of its value (``object``: any)
    - ``minimum`` and ``maximum`` bound a number and are allowed themselves; ``above`` and ``below`` are not
    - ``choices`` are its values; with ``or_function`` a function of the user's, ``MODULE:NAME``, is one, too,
      with ``or_count`` a whole number from 1 on
    - ``default_text`` is the default in words, where the value does not tell it
    - ``engine`` is the only engine that has it, empty for all others; ``names`` are an engine's own names for
      it; ``engine_defaults`` is an engine's default, where that is its own; ``removed`` says for an engine
      that does not take it (any more) what came of it
    - ``must_match`` are the engines whose decode and prefill workers must have the same value,
      by name, or ``REAL_ENGINES``
    - ``is_flag`` is False for what no engine gets on its command line
    - ``same_as`` is, for a setting of the planner, the role and the option of its workers that say the same
    """

    about: str = ""
    default: Any = None
    name: str = ""
    kind: type = object
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    or_function: bool = False
    or_count: bool = False
    default_text: str = ""
    path: str = ""
    engine: str = ""
    names: Mapping[str, tuple[str, ...]] = _NOTHING
    engine_defaults: Mapping[str, Any] = _NOTHING
    removed: Mapping[str, str] = _NOTHING
    must_match: tuple[str, ...] = ()
    is_flag: bool = True
    same_as: tuple[str, str] | None = None

    @property
    def expected(self) -> str:
        """The values that are allowed, in words: the type and its bounds, or the choices."""
        if self.choices:
            return f"one of {self._choices_text}"
        bounds = (words.format(bound) for words, _, bound in self._bounds())
        return ", ".join((_KINDS[self.kind][0], *bounds))

    @property
    def has_effect(self) -> bool:
        """False for an option that is accepted, because Dynamo has it, and ignored."""
        return not self.about.startswith(NO_EFFECT)

    @property
    def default_words(self) -> str:
        """The default in words; empty where there is none."""
        return self.default_text or ("" if self.default in (None, "") else _default_text(self.default))

    @property
    def meaning(self) -> str:
        """The purpose, and the values where they can be listed."""
        return f"{self.about}: {self._choices_text}" if self.choices else self.about

    @property
    def _choices_text(self) -> str:
        count = ", or a whole number from 1 on" if self.or_count else ""
        return ", ".join(self.choices) + (", or MODULE:FUNCTION" if self.or_function else count)

    @property
    def help(self) -> str:
        default = "" if self.kind is bool or not self.default_words else f"  [default: {self.default_words}]"
        return f"{self.meaning}{default}"

    def accepts(self, value: Any) -> bool:
        """Tell whether a value of a file has the type and keeps the bounds. None means "not set"."""
        return value is None or self.read(value) is not None

    def read(self, value: Any, is_text: bool = False) -> Any:
        """The value as the option's type; None when it is not one. ``is_text``: numbers may come as text."""
        if is_text:
            value = _parse_text(value, self.kind)
        if self.or_function and isinstance(value, str) and FUNCTION.fullmatch(value):
            return value
        if self.or_count and is_text and str(value).isdecimal():
            value = int(value)
        if self.or_count and type(value) is int and value >= 1:
            return value
        if value is False and OFF in self.choices:  # as YAML reads the word
            return OFF
        if self.choices and isinstance(value, str):
            value = kebab(value)
        if isinstance(value, str) and self.kind in (Duration, Size):
            value = seconds_of(value) if self.kind is Duration else bytes_of(value)
        if isinstance(value, str) and self.kind is Texts:
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not _KINDS[self.kind][1](value) or (self.choices and value not in self.choices):
            return None
        value = float(value) if self.kind in (float, Duration) else value
        return value if all(holds(value, bound) for _, holds, bound in self._bounds()) else None

    def _bounds(self) -> Iterator[tuple[str, Callable[[Any, Any], bool], float]]:
        """Yield the words of each bound that is set, its comparison, and the bound."""
        for name, words, holds in _BOUNDS:
            if (bound := getattr(self, name)) is not None:
                yield words, holds, bound


Options = Mapping[str, Option]
"""Name in kebab-case -> option."""


def option(default: Any, about: str, **more: Any) -> Any:
    """Declare a field as an option; ``more`` are fields of ``Option``.

    The key is the field's name in kebab-case without its unit, and the type is the annotation's, unless
    ``name`` and ``kind`` say otherwise.
    """
    return field(default=default, metadata={"option": Option(about, default, **more)})


def options_of(*settings: Any) -> Options:
    """The options of these dataclasses together, in the order of their fields."""
    return {name: each for one in settings for name, each in _options_of(one).items()}


@cache
def _options_of(settings: type[Any]) -> Options:
    return {key_of(each): _complete(each, settings) for each in _option_fields(settings)}


def _option_fields(settings: Any) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(settings) if "option" in each.metadata)


def _complete(setting: Field[Any], settings: type[Any]) -> Option:
    """The option with what its field and its dataclass say of it."""
    declared: Option = setting.metadata["option"]
    kind = declared.kind
    if kind is object:
        annotation = str(setting.type).partition(" ")[0].partition("[")[0]  # of "int | None" it is "int"
        kind = str if declared.choices else _ANNOTATED.get(annotation, object)
    return declared._replace(name=key_of(setting), kind=kind, engine=declared.engine or settings.ENGINE)


def key_of(setting: Field[Any]) -> str:
    name = setting.name
    for unit in UNITS:
        name = name.removesuffix(unit)
    return setting.metadata["option"].name or kebab(name)


def kebab(name: str) -> str:
    """The spelling in which keys are compared: ``max_model_len`` is ``max-model-len``."""
    return name.replace("_", "-")


class Settings:
    """The base of a dataclass of options.

    ``SECTION`` is named in errors, and where there is one an unknown key is an error; without one the keys
    are those of a larger section. ``ENGINE`` is the only engine that has these options.
    """

    ENGINE: ClassVar[str] = ""
    SECTION: ClassVar[str] = ""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], places: Mapping[str, str] | None = None) -> Self:
        """Check options as the user wrote them, keys in kebab or snake case. None means "not set".

        Raises ConfigError naming the key (as ``places`` has it, where it does), its value and what was
        expected; for an unknown key of a section, the nearest known one.
        """
        known = options_of(cls)
        given = {kebab(key): (key, value) for key, value in options.items()}
        if cls.SECTION and (unknown := given.keys() - known):
            key = given[min(unknown)][0]
            raise ConfigError(f"{cls.SECTION} has no option {key!r}", hint=nearest(kebab(key), known))
        values = {}
        with all_faults() as faults:
            for name, (key, value) in given.items():
                if name in known and value is not None:
                    with faults.gathering():
                        values[name] = _read_checked(cls, known[name], (places or {}).get(name, key), value)
        keys = {each.name: key_of(each) for each in _option_fields(cls)}
        settings = cls(**{name: values[key] for name, key in keys.items() if key in values})
        settings.check(frozenset(values))
        return settings

    def check(self, given: frozenset[str] = frozenset()) -> None:
        """Raise ConfigError for options that contradict each other; ``given`` are the keys that are set."""

    def to_options(self) -> dict[str, Any]:
        """Map every option that is set to its value, as ``from_options`` reads it."""
        values = ((key_of(each), getattr(self, each.name)) for each in _option_fields(self))
        return {name: value for name, value in values if value is not None}


def _read_checked(settings: type[Settings], option: Option, key: str, value: Any) -> Any:
    read = option.read(value)
    is_left_empty = read == "" and option.default in ("", None)
    is_blank = isinstance(read, str) and not read.strip() and not is_left_empty
    where = f"{settings.SECTION}.{key}" if settings.SECTION else key
    if option.kind is Size and read and (meant := unit_missing(read)):
        raise ConfigError(f"{where} is {shown(value)}: {read} bytes?", hint=f"Write {meant}.")
    if read is None or is_blank:
        raise ConfigError(f"{where} is {shown(value)}", hint=f"Expected {option.expected}.")
    return read


def _parse_text(value: Any, kind: type) -> Any:
    """Turn text into the value that it says, for an option that is no text; ``4.0`` is a whole number."""
    if isinstance(value, str) and kind in (bool, int, float):
        try:
            value = _TRUTH.get(value.strip().lower()) if kind is bool else float(value)
        except ValueError:
            return value
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def _default_text(value: Any) -> str:
    """A default as users write it: ``true``, and ``600`` for 600.0."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_NUMBER


_TRUTH = {"true": True, "false": False}
_ANNOTATED = {"bool": bool, "int": int, "float": float, "str": str, "Mapping": dict, "list": list}
"""Types by the first word of a field's annotation."""

_KINDS: Mapping[type, tuple[str, Callable[[Any], bool]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a number", _is_number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    dict: (
        "a mapping, or its JSON text",
        lambda value: isinstance(value, Mapping) or str(value).lstrip().startswith("{"),
    ),
    list: ("a list", lambda value: isinstance(value, list | str)),
    Texts: (
        "a list of texts, or one text with commas",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ),
    Duration: ("seconds, or a time such as 90s, 30m or 2h", lambda value: _is_number(value) and value >= 0),
    Size: ("bytes, or an amount such as 800MB or 5GB", lambda value: type(value) is int and value >= 0),
    object: ("anything", lambda value: True),
}
"""Type -> its name in words, and whether a value is of it."""

_BOUNDS: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    ("minimum", "{:g} or more", operator.ge),
    ("above", "more than {:g}", operator.gt),
    ("maximum", "{:g} or less", operator.le),
    ("below", "less than {:g}", operator.lt),
)
"""The bounds of an option, their words, and the comparison of a value with them."""
