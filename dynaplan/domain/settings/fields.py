"""Options as fields of a dataclass: what they are called outside, their types and their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any

from dynaplan.domain.errors import ConfigError, nearest


def option(
    default: Any,
    about: str,
    *,
    least: float | None = None,
    above: float | None = None,
    kind: type | None = None,
) -> Any:
    """A field that is an option; ``least`` and ``above`` bound a number from below.

    ``kind`` is its type where the default does not tell it: text where there is none.
    """
    return field(default=default, metadata={"about": about, "least": least, "above": above, "kind": kind})


def given_values(settings: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value of the options as the user wrote them, keys in kebab or snake case.

    Text is read as the option's type. None means "not set". Raises ConfigError naming the key, its value and
    what was expected; for an unknown key, the nearest known one.
    """
    known = {option_name(each): each for each in fields(settings)}
    values: dict[str, Any] = {}
    for key, value in options.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ConfigError(f"Planner has no option {key!r}", hint=nearest(name, known))
        if value is not None:
            values[known[name].name] = _checked(known[name], key, value)
    return values


UNITS = ("_ms", "_s", "_tokens")
"""How the names of settings end; users leave it out."""


def option_name(setting: Field[Any]) -> str:
    """A setting's name outside: kebab-case, without its unit."""
    name = setting.name
    for unit in UNITS:
        name = name.removesuffix(unit)
    return name.replace("_", "-")


def option_type(setting: Field[Any]) -> type:
    """The type of a setting's value: bool, int, float or str."""
    kind = setting.metadata["kind"]
    if kind is not None:
        return kind  # type: ignore[no-any-return]  # of a mapping of anything
    return str if setting.default is None or setting.default is MISSING else type(setting.default)


def _checked(setting: Field[Any], key: str, value: Any) -> Any:
    kind = option_type(setting)
    read = _READERS[kind](value)
    least, above = setting.metadata["least"], setting.metadata["above"]
    bound = ""
    if least is not None:
        bound = f", {least} or more"
    if above is not None:
        bound = f", more than {above}"
    is_fitting = read is not None and (least is None or read >= least) and (above is None or read > above)
    if not is_fitting:
        raise ConfigError(f"Planner.{key}: {value!r}", hint=f"expected {_EXPECTED[kind]}{bound}")
    return read


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_int(value: Any) -> int | None:
    number = _read_float(value)
    return int(number) if number is not None and number == int(number) else None


def _read_str(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


_READERS = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_str}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
