"""The options of a worker's section as the flags of its engine. Nothing here knows a particular engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.stock import OURS, gone_from, names_of


@dataclass(frozen=True)
class FlagStyle:
    """The way in which one engine takes its flags.

    ``handled`` are options that the adapter itself turns into flags. ``renamed`` gives an option the engine's
    name for it. ``gone`` are options of older versions that the engine takes no more, and what came of them:
    they are left out. ``false`` is said as ``--no-option`` for those in ``negatable``, else it is left out.
    ``word`` joins the words of a flag's name.
    """

    handled: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)
    negatable: frozenset[str] = frozenset()
    word: str = "-"


def flag_style(
    engine: str, handled: Iterable[str], also: Mapping[str, str] | None = None, **more: Any
) -> FlagStyle:
    """The style of a known engine: its own names and what it does not take come from the options' table.

    ``also`` are further names, ``more`` are fields of ``FlagStyle``.
    """
    ready = frozenset(handled)
    names = {name: own[0] for name, own in names_of(engine).items() if name not in OURS | ready}
    return FlagStyle(ready, {**names, **(also or {})}, gone_from(engine), **more)


def engine_flags(options: Mapping[str, Any], style: FlagStyle) -> tuple[str, ...]:
    """The command-line words of every option that is the engine's to read, in the order they were given.

    ``true`` is ``--option``, null is left out, a mapping is JSON text, a list is several words.
    """
    left_out = OURS | style.handled | set(style.gone)
    return tuple(
        word
        for option, value in options.items()
        if option not in left_out
        for word in _words(style.renamed.get(option, option), value, style)
    )


def gone_options(options: Mapping[str, Any], style: FlagStyle) -> dict[str, str]:
    """The options that are set and that the engine takes no more, each with what came of it."""
    return {key: why for key, why in style.gone.items() if options.get(key) not in (None, False)}


def memory_fraction(gpus: float, whole_gpu: float) -> float | None:
    """The part of the GPU's memory for an engine that gets a fraction of a GPU; None for whole ones."""
    return round(gpus * whole_gpu, 4) if 0 < gpus < 1 else None


def _words(name: str, value: Any, style: FlagStyle) -> list[str]:
    flag = "--" + name.replace("-", style.word)
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            negated = "--" + f"no-{name}".replace("-", style.word)
            return [negated] if name in style.negatable else []
        case Mapping():
            return [flag, json.dumps(value, separators=(",", ":"))]
        case list() | tuple():
            return [flag, *(_text(each) for each in value)] if value else []
        case _:
            return [flag, _text(value)]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping | list) else str(value)
