"""The options of a worker's section: validated, and turned into flags of its engine's command line."""

from __future__ import annotations

import json
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
    """An engine's conventions for flags.

    ``handled``: options that the adapter itself turns into flags. ``renamed``: option -> the engine's name
    for it. ``removed``: options that the engine no longer accepts -> what replaced them; they are left out.
    ``false`` is written as ``--no-option`` for those in ``negatable``, else it is left out. ``separator``
    stands between the words of a flag: ``-`` or ``_``.
    """

    handled: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    negatable: frozenset[str] = frozenset()
    separator: str = "-"


def flag_style(
    engine: str, handled: Iterable[str], also: Mapping[str, str] | None = None, **more: Any
) -> FlagStyle:
    """Return the style of a known engine: renamed and removed options are those in ``config/stock.py``.

    ``also`` are further renames, ``more`` are fields of ``FlagStyle``.
    """
    adapter_options = frozenset(handled)
    names = {
        name: own[0]
        for name, own in engine_names(engine).items()
        if name not in OWN_OPTIONS | adapter_options
    }
    return FlagStyle(adapter_options, {**names, **(also or {})}, removed_from(engine), **more)


def engine_flags(options: Options, style: FlagStyle) -> tuple[str, ...]:
    """Return the arguments for every option that dynaplan does not consume itself, in the order given.

    ``true`` is ``--option``, null is left out, a mapping is JSON text, a list is several arguments.
    """
    left_out = OWN_OPTIONS | style.handled | set(style.removed)
    return tuple(
        word
        for option, value in options.items()
        if option not in left_out
        for word in _flag_arguments(style.renamed.get(option, option), value, style)
    )


def removed_options(options: Options, style: FlagStyle) -> dict[str, str]:
    """Return the options that are set but no longer accepted by the engine, each with what replaced it."""
    return {key: why for key, why in style.removed.items() if options.get(key) not in (None, False)}


def memory_fraction(gpus: float, whole_gpu: float, given: float = 0.0) -> float | None:
    """Return the fraction of its GPUs' memory that an engine is told to take; None: it decides itself.

    ``given`` where that is set; else, for a part of a GPU, that part of what an engine alone takes of one.
    """
    if given:
        return given
    return round(gpus * whole_gpu, 4) if 0 < gpus < 1 else None


def _flag_arguments(name: str, value: Any, style: FlagStyle) -> list[str]:
    flag = "--" + name.replace("-", style.separator)
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            negated = "--" + f"no-{name}".replace("-", style.separator)
            return [negated] if name in style.negatable else []
        case Mapping():
            return [flag, json.dumps(value, separators=(",", ":"))]
        case list() | tuple():
            return [flag, *(_to_text(each) for each in value)] if value else []
        case _:
            return [flag, _to_text(value)]


def _to_text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping | list) else str(value)


def check_common(options: Options, engine: str, set_here: frozenset[str]) -> None:
    """Raise ConfigError without a model, for an option that dynaplan sets, or for an invalid timeout."""
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


def merge_aliases(options: Options, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that are set, aliases in ``names`` under their canonical name.

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


def hf_token_variable(options: Options) -> dict[str, str]:
    """Return the variable with the token for the Hugging Face hub: any user can read a command line."""
    return {"HF_TOKEN": str(options["hf-token"])} if options.get("hf-token") else {}


def ucx_loopback_variable(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep UCX, which moves KV entries for NIXL, from listening on the machine's network addresses.

    Returns the environment variable to add; none when ``environ`` names the devices that UCX may use.
    """
    return {} if environ.get("UCX_NET_DEVICES") else {"UCX_NET_DEVICES": "lo"}


def physical_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of this worker's GPUs, simulated ones and "-1" (none) left out."""
    gpus = [gpu.strip() for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [gpu for gpu in gpus if gpu and not gpu.startswith(("GPU-SIM-", "-"))]


def drain_deadline_s(options: Options, environ: Mapping[str, str]) -> float:
    """Return the seconds that the worker's requests may take to finish while it drains."""
    own = options.get("drain-deadline") or environ.get("DYNAPLAN_DRAIN_DEADLINE_S")
    return float(own or WorkerSettings.drain_deadline_s)


def lora_names(modules: Any) -> list[str]:
    """Return the names in vLLM's ``lora-modules``: ``name=path`` or JSON with a ``name``, a single one or a
    list.

    Invalid entries are left out: the engine refuses them at its start.
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
