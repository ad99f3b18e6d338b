"""llama-swap's ``config.yaml``: its models, groups and matrix in our terms.

Sources: its ``docs/config.example.yaml`` and ``config-schema.json``. What it means here:

| there | here |
|---|---|
| ``cmd`` | the engine that it starts, where that is recognised (``command_lines``), else ``command`` |
| ``cmdStop`` | ``stop-command`` of a command |
| ``proxy`` | on this machine: its port is ``${PORT}``, also where ``cmd`` has the number of the port |
| ``apiKeys`` | ``api-key``, and the rest of them ``further-api-key`` |
| ``ttl``, ``globalTTL`` | ``ttl``; 0 is never, as there |
| ``healthCheckTimeout`` | ``load-timeout`` of every model |
| ``groups``, ``matrix`` | constraints beside the memory budget; ``evict_costs`` are priorities |
| ``filters`` | ``RequestFilters``; ``setParamsByID`` also makes aliases of its names |
| ``hooks.on_startup.preload`` | loaded at the start |
| ``macros`` | put in when the file is read; ``${PORT}`` and ``${PID}`` are left for the start and the stop |

A key that llama-swap does not have is an error. One that has no meaning here has a note.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaplan.models.files.command_lines import recognise
from dynaplan.models.files.imported_model import ImportedFile, ImportedModel, RequestFilters
from dynaplan.models.files.model_sets import expand
from dynaplan.models.model import Constraints
from dynaplan.util.errors import ConfigError, nearest

TOOL = "llama-swap"

LEFT_TO_US = frozenset({"PORT", "PID"})
"""Macros that are put in when a command is started or stopped."""

MIN_HEALTH_CHECK_S = 15

NO_MEANING = {
    "logLevel": "logs are dynaplan's: `dynaplan logs`",
    "logTimeFormat": "logs are dynaplan's: `dynaplan logs`",
    "logToStdout": "logs are dynaplan's: `dynaplan logs`",
    "metricsMaxInMemory": "metrics are at /metrics",
    "captureBuffer": "requests are not captured",
    "store": "nothing of requests is stored",
    "ui": "the page is at /ui",
    "performance": "metrics are at /metrics",
    "startPort": "ports are leased",
    "sendLoadingState": "a stream gets comments while a model loads, which do not become part of the answer",
    "includeAliasesInList": "aliases are listed",
    "unloadTimeout": "a model finishes what it answers: `drain-deadline`",
    "upstream": "a request by way of /upstream is one as all others",
    "tailcat": "the service is reached at its own address",
    "profiles": "names of models do not change at run time: use aliases",
    "selectors": "a model with several workers is one name: `ServiceArgs.workers`",
    "peers": "models of other machines are not served: `dynaplan join` adds their workers",
}
"""Keys of the file that change nothing here, and why."""

MODEL_NO_MEANING = {
    "name": "is not shown",
    "description": "is not shown",
    "metadata": "is not shown",
    "capabilities": "are not shown",
    "sendLoadingState": NO_MEANING["sendLoadingState"],
    "timeouts": "an answer is waited for as long as its engine makes progress",
    "compat": "WebSockets are not passed on",
    "unloadTimeout": NO_MEANING["unloadTimeout"],
    "concurrencyLimit": "requests above it wait in the engine, and are not answered 429",
}

KEYS = frozenset(
    {
        *("healthCheckTimeout", "globalTTL", "macros", "apiKeys", "models", "groups", "matrix", "hooks"),
        *("routing", *NO_MEANING),
    }
)
MODEL_KEYS = frozenset(
    {
        *("cmd", "cmdStop", "env", "proxy", "checkEndpoint", "ttl", "useModelName", "aliases", "unlisted"),
        *("filters", "macros", *MODEL_NO_MEANING),
    }
)


def is_config(document: Any) -> bool:
    """Tell whether a YAML document is a configuration of llama-swap: it has models with a ``cmd``."""
    models = document.get("models") if isinstance(document, Mapping) else None
    if not isinstance(models, Mapping):
        return False
    return any(isinstance(each, Mapping) and "cmd" in each for each in models.values())


def read(document: Mapping[str, Any], environment: Mapping[str, str]) -> ImportedFile:
    """Return what the file says.

    ``environment`` is what ``${env.NAME}`` is taken from. Raises ConfigError, naming the key.
    """
    _check_keys(document, KEYS, "")
    macros = _mapping(document.get("macros"), "macros")
    models = _mapping(document.get("models"), "models")
    notes = [f"{key}: {why}." for key, why in NO_MEANING.items() if document.get(key) not in (None, {}, [])]
    imported = {}
    for name, model in models.items():
        where = f"models.{name}"
        own = dict(_mapping(model, where))
        filling = _Macros(
            {**macros, **_mapping(own.pop("macros", None), f"{where}.macros")}, name, environment
        )
        imported[name] = _model(name, filling.fill(own, where), document, notes)
    constraints, priorities = _constraints(document, imported, notes)
    for name, priority in priorities.items():
        options = {**imported[name].options, "priority": priority}
        imported[name] = replace(imported[name], options=options)
    keys = _Macros(macros, "", environment).fill(document.get("apiKeys") or [], "apiKeys")
    preload = _preload(document, imported)
    api_keys = tuple(map(str, _list(keys, "apiKeys")))
    return ImportedFile(TOOL, imported, constraints, preload, api_keys, tuple(dict.fromkeys(notes)))


# models


def _model(
    name: str, model: Mapping[str, Any], document: Mapping[str, Any], notes: list[str]
) -> ImportedModel:
    where = f"models.{name}"
    _check_keys(model, MODEL_KEYS, where)
    unused = [(key, why) for key, why in MODEL_NO_MEANING.items() if model.get(key) not in _EMPTY]
    notes += [f"{where}.{key}: {why}." for key, why in unused]
    words = split_command(str(model.get("cmd") or ""), f"{where}.cmd")
    url, words = _address(str(model.get("proxy") or ""), words, where, notes)
    options = dict(recognise(words) or {"command": shlex.join(words)})
    envs = _environment(model.get("env") or [], where)
    if "command" in options:
        options["check"] = _check_path(str(model.get("checkEndpoint", "/health")), where, notes)
    options |= _lifetime(model, document, where)
    if envs:
        options["ServiceArgs"] = {"envs": envs}
    filters = _filters(_mapping(model.get("filters"), f"{where}.filters"), where)
    if aliases := _aliases(name, _list(model.get("aliases") or [], f"{where}.aliases"), filters):
        options["aliases"] = aliases
    return ImportedModel(
        options,
        url,
        str(model.get("cmdStop") or ""),
        str(model.get("useModelName") or ""),
        bool(model.get("unlisted")),
        filters,
    )


_EMPTY: tuple[Any, ...] = (None, "", 0, False, {}, [])


def split_command(text: str, where: str) -> list[str]:
    """Return the words of a ``cmd``: lines of comments are left out, and a backslash joins lines."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    try:
        words = shlex.split("\n".join(lines).replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", hint="Close every quote.") from None
    if not words:
        raise ConfigError(f"{where} is empty", hint="Expected the command that starts the model's server.")
    return words


def _lifetime(model: Mapping[str, Any], document: Mapping[str, Any], where: str) -> dict[str, Any]:
    ttl = _number(model.get("ttl", -1), f"{where}.ttl", -1)
    if ttl < 0:
        ttl = _number(document.get("globalTTL", 0), "globalTTL", 0)
    found: dict[str, Any] = {"ttl": ttl}
    if "healthCheckTimeout" in document:
        given = _number(document["healthCheckTimeout"], "healthCheckTimeout", 0)
        found["load-timeout"] = max(MIN_HEALTH_CHECK_S, given)
    return found


def _environment(given: Any, where: str) -> dict[str, str]:
    envs = {}
    for each in _list(given, f"{where}.env"):
        name, is_there, value = str(each).partition("=")
        if not is_there:
            raise ConfigError(f"{where}.env: {each!r}", hint="Expected NAME=value.")
        envs[name] = value
    return envs


def _filters(filters: Mapping[str, Any], where: str) -> RequestFilters:
    _check_keys(filters, frozenset({"stripParams", "setParams", "setParamsByID"}), f"{where}.filters")
    removed = [each.strip() for each in str(filters.get("stripParams") or "").split(",")]
    by_name = _mapping(filters.get("setParamsByID"), f"{where}.filters.setParamsByID")
    return RequestFilters(
        tuple(each for each in removed if each and each != "model"),
        _without_model(_mapping(filters.get("setParams"), f"{where}.filters.setParams")),
        {
            str(name): _without_model(_mapping(each, f"{where}.filters.setParamsByID.{name}"))
            for name, each in by_name.items()
        },
    )


def _without_model(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if key != "model"}


def _aliases(name: str, given: Sequence[Any], filters: RequestFilters) -> list[str]:
    """Return the further names: aliases, which may be mappings with an ``id``, and those of filters."""
    names = [str(each.get("id")) if isinstance(each, Mapping) else str(each) for each in given]
    return [each for each in dict.fromkeys([*names, *filters.set_by_name]) if each != name]


PORT = "${PORT}"

_OWN_URL = re.compile(r"http://(?:localhost|127\.0\.0\.1|\[::1\]):(?P<port>\$\{PORT\}|\d+)/?")


def _address(proxy: str, words: list[str], where: str, notes: list[str]) -> tuple[str, list[str]]:
    """Return where the command listens, empty where that is ``${PORT}`` of this machine; and its words.

    A port that is written in both becomes ``${PORT}``, so that it cannot be another program's.
    """
    found = _OWN_URL.fullmatch(proxy)
    if found is None:
        return proxy, words
    if recognise(words) or any(PORT in word for word in words):
        if found["port"] != PORT:
            notes.append(f"{where}.proxy: requests go to the port that stands for {PORT}.")
        return "", words
    number = re.compile(rf"(?<![\d.]){found['port']}(?![\d.])")
    if sum(len(number.findall(word)) for word in words) != 1:
        return proxy, words
    return "", [number.sub(PORT, word) for word in words]


WITHOUT_CHECK = "/v1/models"
"""What is asked for of a command that is not to be checked: its port has to answer first."""


def _check_path(given: str, where: str, notes: list[str]) -> str:
    if given != "none":
        return given
    notes.append(f"{where}.checkEndpoint: none: it is ready when it answers {WITHOUT_CHECK}.")
    return WITHOUT_CHECK


# what may be loaded together


def _constraints(
    document: Mapping[str, Any], models: Mapping[str, ImportedModel], notes: list[str]
) -> tuple[Constraints, dict[str, float]]:
    """Return what groups or the matrix say, and the priorities that the matrix gives."""
    groups, matrix = document.get("groups"), document.get("matrix")
    if "routing" in document:
        if groups or matrix:
            problem = "both routing and groups or matrix at the top"
            raise ConfigError(problem, hint="llama-swap takes one of them: use routing.")
        router = _mapping(_mapping(document["routing"], "routing").get("router"), "routing.router")
        settings = _mapping(router.get("settings"), "routing.router.settings")
        is_matrix = router.get("use") == "matrix"
        groups, matrix = (None, settings.get("matrix")) if is_matrix else (settings.get("groups"), None)
    if groups and matrix:
        raise ConfigError("both groups and matrix", hint="llama-swap takes one of them.")
    if matrix:
        return _matrix(_mapping(matrix, "matrix"), models)
    return (_groups(_mapping(groups, "groups"), models) if groups else _one_at_a_time(models, notes)), {}


def _one_at_a_time(models: Mapping[str, ImportedModel], notes: list[str]) -> Constraints:
    """Return the constraints of a file without groups, in which llama-swap runs one model at a time.

    Models whose memory is known share it. A command of which nothing is known has the machine for itself, as
    there.
    """
    unknown = {name for name, each in models.items() if "engine" not in each.options}
    if not unknown or len(models) < 2:
        return Constraints()
    names = ", ".join(sorted(unknown))
    notes.append(
        f"{names}: loaded alone, as in llama-swap without groups, for their memory is not known; "
        "a group with swap: false lets models run together."
    )
    leaves = {name: frozenset(models if name in unknown else unknown) - {name} for name in models}
    return Constraints(leaves=leaves)


def _matrix(
    matrix: Mapping[str, Any], models: Mapping[str, ImportedModel]
) -> tuple[Constraints, dict[str, float]]:
    _check_keys(matrix, frozenset({"vars", "evict_costs", "sets"}), "matrix")
    short = {str(key): str(value) for key, value in _mapping(matrix.get("vars"), "matrix.vars").items()}
    for key, name in short.items():
        _check_model(name, models, f"matrix.vars.{key}")
    names = {**{name: name for name in models}, **short}
    costs = {}
    for key, cost in _mapping(matrix.get("evict_costs"), "matrix.evict_costs").items():
        _check_model(str(key), names, "matrix.evict_costs")
        costs[names[str(key)]] = max(0.001, _number(cost, f"matrix.evict_costs.{key}", 0))
    return Constraints(together=tuple(expand(_mapping(matrix.get("sets"), "matrix.sets"), names))), costs


def _groups(groups: Mapping[str, Any], models: Mapping[str, ImportedModel]) -> Constraints:
    """Return who must leave for whom. A model in no group is in one of its own kind: swap and exclusive."""
    read = {name: _group(name, _mapping(group, f"groups.{name}"), models) for name, group in groups.items()}
    grouped = [member for members, *_ in read.values() for member in members]
    if twice := next((each for each in grouped if grouped.count(each) > 1), None):
        raise ConfigError(f"groups: {twice!r} is in two groups", hint="Give each model to one group.")
    rest = frozenset(models) - set(grouped)
    all_groups = [*read.values(), (rest, True, True, False)]
    leaves = {}
    for members, swaps, is_exclusive, _ in all_groups:
        others = [each for each, *_, persists in all_groups if each is not members and not persists]
        for name in members:
            gone = (members - {name} if swaps else frozenset()).union(*(others if is_exclusive else []))
            if gone:
                leaves[name] = gone
    return Constraints(leaves=leaves)


_Group = tuple[frozenset[str], bool, bool, bool]
"""Members; whether one of them runs at a time, others leave for it, and it never leaves for others."""


def _group(name: str, group: Mapping[str, Any], models: Mapping[str, ImportedModel]) -> _Group:
    _check_keys(group, frozenset({"swap", "exclusive", "persistent", "members"}), f"groups.{name}")
    members = frozenset(map(str, _list(group.get("members") or [], f"groups.{name}.members")))
    for member in sorted(members):
        _check_model(member, models, f"groups.{name}.members")
    flags = (("swap", True), ("exclusive", True), ("persistent", False))
    swaps, is_exclusive, persists = (bool(group.get(key, default)) for key, default in flags)
    return members, swaps, is_exclusive, persists


def _preload(document: Mapping[str, Any], models: Mapping[str, ImportedModel]) -> tuple[str, ...]:
    hooks = _mapping(document.get("hooks"), "hooks")
    _check_keys(hooks, frozenset({"on_startup"}), "hooks")
    begin = _mapping(hooks.get("on_startup"), "hooks.on_startup")
    _check_keys(begin, frozenset({"preload", "profile"}), "hooks.on_startup")
    names = tuple(map(str, _list(begin.get("preload") or [], "hooks.on_startup.preload")))
    for name in names:
        _check_model(name, models, "hooks.on_startup.preload")
    return names


# macros

_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")


class _Macros:
    """Puts macros in: those of the file and of one model, ``${MODEL_ID}`` and ``${env.NAME}``."""

    def __init__(self, macros: Mapping[str, Any], model: str, environment: Mapping[str, str]) -> None:
        self._values = {**macros, **({"MODEL_ID": model} if model else {})}
        self._environment = environment

    def fill(self, value: Any, where: str) -> Any:
        """Return the value with all macros put in; one that is a whole text keeps its type."""
        if isinstance(value, Mapping):
            return {self.fill(key, where): self.fill(each, f"{where}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [self.fill(each, where) for each in value]
        if not isinstance(value, str):
            return value
        whole = _MACRO.fullmatch(value)
        if whole and whole[1] not in LEFT_TO_US:
            return self._value(whole[1], where, ())
        return self._filled(value, where, ())

    def _filled(self, text: str, where: str, above: tuple[str, ...]) -> str:
        def replacement(found: re.Match[str]) -> str:
            return found[0] if found[1] in LEFT_TO_US else str(self._value(found[1], where, above))

        return _MACRO.sub(replacement, text)

    def _value(self, name: str, where: str, above: tuple[str, ...]) -> Any:
        if name.startswith("env."):
            variable = name.removeprefix("env.")
            if variable not in self._environment:
                raise ConfigError(f"{where}: the environment has no {variable}", hint=f"Set {variable}.")
            return self._environment[variable]
        if name not in self._values:
            raise ConfigError(f"{where}: no macro is called {name!r}", hint=nearest(name, self._values))
        if name in above:
            cycle = " -> ".join((*above, name))
            raise ConfigError(f"{where}: the macro {name!r} contains itself", hint=cycle)
        value = self._values[name]
        return self._filled(value, where, (*above, name)) if isinstance(value, str) else value


# checks


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} = {value!r}", hint="Expected a mapping.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} = {value!r}", hint="Expected a list.")
    return value


def _number(value: Any, where: str, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise ConfigError(f"{where} = {value!r}", hint=f"Expected a number, {least:g} or more.")
    return value


def _check_keys(document: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in document:
        if key not in known:
            place = f"{where}.{key}" if where else str(key)
            raise ConfigError(f"{place}: llama-swap has no such key", hint=nearest(str(key), known))


def _check_model(name: str, models: Mapping[str, Any], where: str) -> None:
    if name not in models:
        raise ConfigError(f"{where}: no model is called {name!r}", hint=nearest(name, models))
