"""The options of a worker's section: checked, and as the flags of its engine.

Nothing here knows a particular engine.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.parallelism import DATA
from dynaplan.config.settings.worker import WorkerSettings
from dynaplan.config.stock import OWN_OPTIONS, engine_names, removed_from
from dynaplan.util.errors import ConfigError

Options = Mapping[str, Any]
"""The worker's section of the configuration, keys in kebab-case."""


@dataclass(frozen=True)
class FlagStyle:
    """The way in which one engine takes its flags.

    ``handled`` are options that the adapter itself turns into flags. ``renamed`` gives an option the engine's
    name for it. ``removed`` are options of older versions that the engine takes no more, and what came of
    them: they are left out. ``false`` is written as ``--no-option`` for those in ``negatable``, else it is
    left out. ``word`` joins the words of a flag's name.
    """

    handled: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    negatable: frozenset[str] = frozenset()
    word: str = "-"


def flag_style(
    engine: str, handled: Iterable[str], also: Mapping[str, str] | None = None, **more: Any
) -> FlagStyle:
    """The style of a known engine: its own names and what it does not take come from the options' table.

    ``also`` are further names, ``more`` are fields of ``FlagStyle``.
    """
    ready = frozenset(handled)
    names = {name: own[0] for name, own in engine_names(engine).items() if name not in OWN_OPTIONS | ready}
    return FlagStyle(ready, {**names, **(also or {})}, removed_from(engine), **more)


def engine_flags(options: Options, style: FlagStyle) -> tuple[str, ...]:
    """The command-line words of every option that is the engine's to read, in the order they were given.

    ``true`` is ``--option``, null is left out, a mapping is JSON text, a list is several words.
    """
    left_out = OWN_OPTIONS | style.handled | set(style.removed)
    return tuple(
        word
        for option, value in options.items()
        if option not in left_out
        for word in _words(style.renamed.get(option, option), value, style)
    )


def removed_options(options: Options, style: FlagStyle) -> dict[str, str]:
    """The options that are set and that the engine takes no more, each with what came of it."""
    return {key: why for key, why in style.removed.items() if options.get(key) not in (None, False)}


def memory_fraction(gpus: float, whole_gpu: float, given: float = 0.0) -> float | None:
    """The part of the GPU's memory for an engine that gets a fraction of a GPU; None for whole ones.

    ``given`` is the part that an engine was given which shares its GPUs with other models, 0 for none.
    """
    if given:
        return given
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


def check_common(options: Options, engine: str, set_here: frozenset[str]) -> None:
    """Raise ConfigError without a model, for an option that dynaplan sets, and for timeouts that are none."""
    if not isinstance(options.get("model"), str) or not options["model"].strip():
        raise ConfigError(
            f"model is {options.get('model')!r}", hint=f"Expected the model that {engine} serves."
        )
    for option in sorted(set_here & set(options)):
        if options[option] not in (None, False):
            raise ConfigError(
                f"{option} cannot be set with engine {engine}", hint="Leave it out: dynaplan sets it."
            )
    WorkerSettings.from_options(options)


def merge_synonyms(options: Options, names: Mapping[str, str]) -> dict[str, Any]:
    """The options that are set, those of ``names`` under the name there.

    Raises ConfigError where two names of the same option have different values.
    """
    found: dict[str, tuple[str, Any]] = {}
    for option, value in options.items():
        if value is None:
            continue
        other, taken = found.setdefault(names.get(option, option), (option, value))
        if taken != value:
            raise ConfigError(
                f"{other} is {taken!r} and {option} is {value!r}",
                hint="Keep one: they are two names of the same option.",
            )
    return {name: value for name, (_, value) in found.items()}


def check_no_data_parallel(options: Options, engine: str) -> None:
    """Raise ConfigError for data parallel ranks: this engine has none within one server."""
    for name in DATA:
        if options.get(name) not in (None, 1):
            raise ConfigError(
                f"{name} is {options[name]!r}, but one worker of engine {engine} has one copy of the model",
                hint="Leave it out, and set ServiceArgs.workers.",
            )


def hub_token(options: Options) -> dict[str, str]:
    """The environment variable with the token for the Hugging Face hub; a command line can be read by all."""
    return {"HF_TOKEN": str(options["hf-token"])} if options.get("hf-token") else {}


def loopback_transport(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep UCX, which moves KV entries for NIXL, from listening on the machine's network addresses.

    Returns the environment variable to add; none when ``environ`` names the devices that UCX may use.
    """
    return {} if environ.get("UCX_NET_DEVICES") else {"UCX_NET_DEVICES": "lo"}


def command_words(value: Any, option: str) -> list[str]:
    """Split a command, given as one text or as a list of words; [] when it is not given."""
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{option} is {value!r}: {error}", hint="Expected a command line.") from None
    if words is None:
        return []
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{option} is {value!r}", hint="Expected a command: a text, or a list of words.")
    return words


def real_gpus(environ: Mapping[str, str]) -> list[str]:
    """The UUIDs of this worker's GPUs, simulated GPUs left out."""
    gpus = [gpu.strip() for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [gpu for gpu in gpus if gpu and not gpu.startswith(("GPU-SIM-", "-"))]


def drain_deadline_s(options: Options, environ: Mapping[str, str]) -> float:
    """The seconds that the worker's requests may take to finish when it leaves."""
    own = options.get("drain-deadline") or environ.get("DYNAPLAN_DRAIN_DEADLINE_S")
    return float(own or WorkerSettings.drain_deadline_s)


def lora_names(modules: Any) -> list[str]:
    """Return the names in vLLM's ``lora-modules``: ``name=path``, or JSON with a ``name``, one or a list.

    What is neither is left out: the engine refuses it at its start.
    """
    entries = modules if isinstance(modules, list) else [] if modules is None else [modules]
    texts = [text for each in entries for text in (each.split() if _is_plain_text(each) else [each])]
    return [name for each in texts if (name := _adapter_name(each))]


def _is_plain_text(entry: Any) -> bool:
    return isinstance(entry, str) and not entry.lstrip().startswith("{")


def _adapter_name(entry: Any) -> str:
    if isinstance(entry, str) and not _is_plain_text(entry):
        try:
            entry = json.loads(entry)
        except ValueError:
            return ""
    if isinstance(entry, dict):
        return str(entry.get("name") or "")
    name, equals, _ = str(entry).partition("=")
    return name if equals else ""
