"""llama-swap's ``config.yaml``: its models, groups and matrix in our terms.

Sources: its ``config.example.yaml``, ``config-schema.json`` and ``internal/config``. What it means here:

| there | here |
|---|---|
| ``cmd`` | ``command``, as it stands; the engine that it starts is recognised (``command_words``) |
| ``cmdStop`` | ``stop-command`` of a command |
| ``proxy`` | on this machine and ``${PORT}``: nothing; another address: ``url`` of the command |
| ``checkEndpoint`` | ``check`` of a command |
| ``apiKeys`` | ``api-key``, and the rest of them ``further-api-key`` |
| ``ttl``, ``globalTTL`` | ``ttl``; 0 is never, as there |
| ``healthCheckTimeout`` | ``load-timeout`` of every model |
| ``concurrencyLimit`` | ``concurrency-limit``; what is above it waits, and is not answered 429 |
| ``name``, ``description``, ``metadata`` | ``display-name``, ``description``, ``metadata`` |
| ``groups``, ``matrix`` | constraints beside the memory budget; ``evict_costs`` are priorities |
| ``filters`` | ``RequestFilters``; ``setParamsByID`` also makes aliases of its names |
| ``hooks.on_startup.preload`` | loaded at the start; a group's name stands for its members |
| ``macros`` | put in when the file is read; ``${PORT}`` and ``${PID}`` are left for the start and the stop |

A model may be named by an alias wherever one is named. What has no meaning here, a key that llama-swap does
not have, and a name that no model has, each get a note, and nothing else is changed by them.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaplan.config.command_words import read_command, recognise, split_words, without_comments
from dynaplan.models.files.imported_model import ImportedFile, ImportedModel, MatchRule, RequestFilters
from dynaplan.models.files.model_sets import expand
from dynaplan.models.model import Constraints
from dynaplan.util.errors import ConfigError, Faults, nearest

TOOL = "llama-swap"

LEFT_TO_US = frozenset({"PORT", "PID"})
"""Macros that are put in when a command is started or stopped."""

MIN_HEALTH_CHECK_S = 15

_LOGS = "logs are dynaplan's: `dynaplan logs`"
_LOADING = "a stream gets comments while a model loads, which do not become part of the answer"
_DRAINS = "a model finishes what it answers: `drain-deadline`"
_NO_PEERS = "models of other services are not served here: ask them at their own address"

NO_MEANING = {
    "logLevel": _LOGS,
    "logTimeFormat": _LOGS,
    "logToStdout": _LOGS,
    "logRequests": _LOGS,
    "metricsMaxInMemory": "metrics are at /metrics",
    "captureBuffer": "requests are not captured",
    "store": "nothing of requests is stored",
    "ui": "the page is at /ui",
    "performance": "metrics are at /metrics",
    "startPort": "ports are leased",
    "sendLoadingState": _LOADING,
    "includeAliasesInList": "aliases are listed",
    "unloadTimeout": _DRAINS,
    "upstream": "every path below /upstream loads the model",
    "tailcat": "the service is reached at its own address",
    "profiles": "names of models do not change at run time: use aliases",
    "selectors": "a model with several workers is one name: `ServiceArgs.workers`",
    "peers": _NO_PEERS,
    "peer": _NO_PEERS,
}
"""Keys of the file that change nothing here, and why."""

MODEL_NO_MEANING = {
    "capabilities": "are not shown",
    "sendLoadingState": _LOADING,
    "timeouts": "an answer is waited for as long as its engine makes progress",
    "compat": "WebSockets are not passed on",
    "unloadTimeout": _DRAINS,
}

ROUTING_NO_MEANING = {"scheduler": "a model's requests are served together, and none waits without end"}

KEYS = frozenset(
    {
        *("healthCheckTimeout", "globalTTL", "macros", "apiKeys", "models", "groups", "matrix", "hooks"),
        *("routing", *NO_MEANING),
    }
)
MODEL_KEYS = frozenset(
    {
        *("cmd", "cmdStop", "env", "proxy", "checkEndpoint", "ttl", "useModelName", "aliases", "unlisted"),
        *("filters", "macros", "name", "description", "metadata", "concurrencyLimit", *MODEL_NO_MEANING),
    }
)
FILTER_KEYS = frozenset({"stripParams", "strip_params", "setParams", "setParamsByID", "setParamsByMatch"})


class FoldedText(str):
    """A text of a folded block (``>``) of a YAML file; ``lines`` is as it was written: comments end there."""

    lines: str


def is_config(document: Any) -> bool:
    """Tell whether a YAML document is a configuration of llama-swap: it has models with a ``cmd``."""
    models = document.get("models") if isinstance(document, Mapping) else None
    if not isinstance(models, Mapping):
        return False
    return any(isinstance(each, Mapping) and "cmd" in each for each in models.values())


def read(document: Mapping[str, Any], environment: Mapping[str, str]) -> ImportedFile:
    """Return what the file says.

    ``environment`` is what ``${env.NAME}`` is taken from. Raises ConfigError with all
    faults, each with its key.
    """
    return _Reader(document, environment).read()


class _Reader:
    """Reads one file; ``notes``, ``models`` and ``faults`` grow meanwhile."""

    def __init__(self, document: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._document = document
        self._environment = environment
        self._faults = Faults()
        self._macros = self._mapping(document.get("macros"), "macros")
        self._models: dict[str, ImportedModel] = {}
        self._notes: list[str] = []

    def read(self) -> ImportedFile:
        document = self._document
        self._note_unused(document, KEYS, NO_MEANING, "")
        self._note_unused(
            self._mapping(document.get("routing"), "routing"), {"router"}, ROUTING_NO_MEANING, "routing"
        )
        for name, model in self._mapping(document.get("models"), "models").items():
            with self._faults.gathering():
                self._models[str(name)] = self._model(str(name), self._mapping(model, f"models.{name}"))
        self._faults.raise_all()  # what follows names the models
        constraints = self._constraints()
        keys = _Macros(self._macros, self._environment).fill(document.get("apiKeys") or [], "apiKeys")
        api_keys = tuple(map(str, self._list(keys, "apiKeys")))
        preload = self._preload()
        self._faults.raise_all()
        notes = tuple(dict.fromkeys(self._notes))
        return ImportedFile(TOOL, self._models, constraints, preload, api_keys, notes)

    # -- models ----------------------------------------------------------------------------------

    def _model(self, name: str, given: Mapping[str, Any]) -> ImportedModel:
        where = f"models.{name}"
        self._note_unused(given, MODEL_KEYS, MODEL_NO_MEANING, where)
        own = self._mapping(given.get("macros"), f"{where}.macros")
        macros = _Macros({**self._macros, **own, "MODEL_ID": name}, self._environment)
        words = list[str]()
        with self._faults.gathering():
            words = split_command(macros.fill_command(given.get("cmd"), f"{where}.cmd"), f"{where}.cmd")
        stop = macros.fill_command(given.get("cmdStop"), f"{where}.cmdStop")
        left = ("macros", "cmd", "cmdStop", "env")
        model = macros.fill({key: each for key, each in given.items() if key not in left}, where)
        options: dict[str, Any] = {"command": shlex.join(words)}
        url, is_engine = _address(str(model.get("proxy") or "")), recognise(read_command(words).words)
        if is_engine and url:
            self._notes.append(f"{where}.proxy: the engine gets a port of its own.")
            url = ""
        if not is_engine:
            options["check"] = str(model.get("checkEndpoint") or "/health")
        filters = self._filters(self._mapping(model.get("filters"), f"{where}.filters"), where)
        envs = self._envs(macros.fill(given.get("env") or [], f"{where}.env", keeps_unknown=True), where)
        aliases = _aliases(name, self._list(model.get("aliases") or [], f"{where}.aliases"), filters)
        said = {
            "ServiceArgs": {"envs": envs} if envs else None,
            "aliases": aliases,
            "display-name": str(model.get("name") or "").strip(),
            "description": str(model.get("description") or "").strip(),
            "metadata": dict(self._mapping(model.get("metadata"), f"{where}.metadata")),
            "concurrency-limit": int(
                self._number(model.get("concurrencyLimit") or 0, f"{where}.concurrencyLimit", 0)
            ),
        }
        options |= self._lifetime(model, where) | {key: each for key, each in said.items() if each}
        upstream_name = str(model.get("useModelName") or "")
        return ImportedModel(options, url, stop.strip(), upstream_name, bool(model.get("unlisted")), filters)

    def _lifetime(self, model: Mapping[str, Any], where: str) -> dict[str, Any]:
        document = self._document
        ttl = self._number(model.get("ttl", -1), f"{where}.ttl", -1)
        if ttl < 0:
            ttl = self._number(document.get("globalTTL", 0), "globalTTL", 0)
        found: dict[str, Any] = {"ttl": ttl}
        if "healthCheckTimeout" in document:
            given = self._number(document["healthCheckTimeout"], "healthCheckTimeout", 0)
            found["load-timeout"] = max(MIN_HEALTH_CHECK_S, given)
        return found

    def _envs(self, given: Any, where: str) -> dict[str, str]:
        pairs = [str(each).partition("=") for each in self._list(given, f"{where}.env")]
        for name in (name for name, is_there, _ in pairs if not is_there):
            self._notes.append(f"{where}.env: {name!r} is left out: expected NAME=value.")
        return {name: value for name, is_there, value in pairs if is_there}

    def _filters(self, filters: Mapping[str, Any], where: str) -> RequestFilters:
        where = f"{where}.filters"
        self._note_unused(filters, FILTER_KEYS, {}, where)
        stripped = filters.get("stripParams") or filters.get("strip_params") or ""
        removed = stripped if isinstance(stripped, list) else str(stripped).split(",")
        by_name = self._mapping(filters.get("setParamsByID"), f"{where}.setParamsByID")
        rules = self._list(filters.get("setParamsByMatch") or [], f"{where}.setParamsByMatch")
        return RequestFilters(
            tuple(name for each in removed if (name := str(each).strip()) and name != "model"),
            _without_model(filters.get("setParams"), f"{where}.setParams"),
            {
                str(name): _without_model(each, f"{where}.setParamsByID.{name}")
                for name, each in by_name.items()
            },
            tuple(_match_rule(each, f"{where}.setParamsByMatch") for each in rules),
        )

    # -- what may be loaded together -------------------------------------------------------------

    def _constraints(self) -> Constraints:
        """Return what groups or the matrix say, and that models of one port leave for each other."""
        groups, matrix = self._routing()
        if matrix:
            found = self._matrix(self._mapping(matrix, "matrix"))
        elif groups:
            found = self._group_constraints(groups)
        else:
            found = self._one_at_a_time()
        leaves = dict(found.leaves)
        ports = {name: port for name, each in self._models.items() if (port := _port(each.url))}
        for name, port in ports.items():
            same = frozenset(each for each in ports if ports[each] == port and each != name)
            if others := same - leaves.get(name, frozenset()):
                leaves[name] = leaves.get(name, frozenset()) | others
                also = ", ".join(sorted(others))
                self._notes.append(
                    f"models.{name}.proxy: {port} is the port of {also}, too: one runs at a time."
                )
        return replace(found, leaves=leaves)

    def _one_at_a_time(self) -> Constraints:
        """Return the constraints of a file without groups, in which llama-swap runs one model at a time.

        Models whose memory is known share it. A command of which nothing is known has the machine for itself,
        as there.
        """
        models = self._models
        unknown = {name for name, each in models.items() if "check" in each.options}
        if not unknown or len(models) < 2:
            return Constraints()
        names = ", ".join(sorted(unknown))
        self._notes.append(
            f"{names}: loaded alone, as in llama-swap without groups, for their memory is not known; "
            "a group with swap: false lets models run together."
        )
        leaves = {name: frozenset(models if name in unknown else unknown) - {name} for name in models}
        return Constraints(leaves=leaves)

    def _routing(self) -> tuple[Mapping[str, Any], Any]:
        """Return the groups and the matrix, one of them empty, wherever this version of the file has them.

        Raises ConfigError for both.
        """
        document = self._document
        groups, matrix = document.get("groups"), document.get("matrix")
        if "routing" in document:
            if groups or matrix:
                problem = "both routing and groups or matrix at the top"
                raise ConfigError(problem, hint="llama-swap takes one of them: use routing.")
            router = self._mapping(
                self._mapping(document["routing"], "routing").get("router"), "routing.router"
            )
            settings = self._mapping(router.get("settings"), "routing.router.settings")
            is_matrix = router.get("use") == "matrix"
            groups, matrix = (None, settings.get("matrix")) if is_matrix else (settings.get("groups"), None)
        if groups and matrix:
            raise ConfigError("both groups and matrix", hint="llama-swap takes one of them.")
        return self._mapping(groups, "groups"), matrix

    def _matrix(self, matrix: Mapping[str, Any]) -> Constraints:
        self._note_unused(matrix, frozenset({"vars", "evict_costs", "sets"}), {}, "matrix")
        names = self._names()
        for short, name in self._mapping(matrix.get("vars"), "matrix.vars").items():
            names[str(short)] = self._find(str(name), names, f"matrix.vars.{short}")
        for key, cost in self._mapping(matrix.get("evict_costs"), "matrix.evict_costs").items():
            if model := self._find(str(key), names, "matrix.evict_costs"):
                priority = max(0.001, self._number(cost, f"matrix.evict_costs.{key}", 0))
                options = {**self._models[model].options, "priority": priority}
                self._models[model] = replace(self._models[model], options=options)
        sets = expand(
            self._mapping(matrix.get("sets"), "matrix.sets"),
            lambda name, where: self._find(name, names, where),
            self._models,
        )
        return Constraints(together=tuple(each for each in sets if each))

    def _group_constraints(self, groups: Mapping[str, Any]) -> Constraints:
        """Return who must leave for whom; raises ConfigError for a model in two groups.

        The models in no group are a group that swaps and is exclusive.
        """
        read = {
            name: self._group(name, self._mapping(group, f"groups.{name}")) for name, group in groups.items()
        }
        grouped = Counter(member for members, *_ in read.values() for member in members)
        if twice := next((each for each, times in grouped.items() if times > 1), None):
            raise ConfigError(f"groups: {twice!r} is in two groups", hint="Give each model to one group.")
        all_groups = [*read.values(), (frozenset(self._models) - set(grouped), True, True, False)]
        leaves = {}
        for members, swaps, is_exclusive, _ in all_groups:
            others = [each for each, *_, persists in all_groups if each is not members and not persists]
            for name in members:
                gone = (members - {name} if swaps else frozenset()).union(*(others if is_exclusive else []))
                if gone:
                    leaves[name] = gone
        return Constraints(leaves=leaves)

    def _group(self, name: str, given: Any) -> _Group:
        group = self._mapping(given, f"groups.{name}")
        self._note_unused(
            group, frozenset({"swap", "exclusive", "persistent", "members"}), {}, f"groups.{name}"
        )
        flags = (("swap", True), ("exclusive", True), ("persistent", False))
        swaps, is_exclusive, persists = (bool(group.get(key, default)) for key, default in flags)
        return frozenset(self._members(name, group)), swaps, is_exclusive, persists

    def _members(self, name: str, group: Mapping[str, Any]) -> list[str]:
        where, names = f"groups.{name}.members", self._names()
        given = self._list(group.get("members") or [], where)
        return [model for each in given if (model := self._find(str(each), names, where))]

    def _preload(self) -> tuple[str, ...]:
        hooks = self._mapping(self._document.get("hooks"), "hooks")
        self._note_unused(hooks, frozenset({"on_startup"}), {}, "hooks")
        begin, where = self._mapping(hooks.get("on_startup"), "hooks.on_startup"), "hooks.on_startup.preload"
        self._note_unused(begin, frozenset({"preload", "profile"}), {}, "hooks.on_startup")
        groups, _ = self._routing()
        names, found = self._names(), list[str]()
        for each in self._list(begin.get("preload") or [], where):
            if each in groups and each not in names:
                found += self._members(each, self._mapping(groups[each], f"groups.{each}"))
            elif model := self._find(str(each).strip(), names, where):
                found.append(model)
        return tuple(dict.fromkeys(found))

    # -- names and notes -------------------------------------------------------------------------

    def _names(self) -> dict[str, str]:
        """Return the model of each name and alias."""
        aliases = {
            alias: name for name, each in self._models.items() for alias in each.options.get("aliases", ())
        }
        return {**aliases, **{name: name for name in self._models}}

    def _find(self, name: str, names: Mapping[str, str], where: str) -> str:
        """Return the model of that name; empty, with a note, where there is none."""
        if name not in names:
            note = f"{where}: no model is called {name!r}, so it is left out."
            self._notes.append(note + _similar(name, names))
        return names.get(name, "")

    def _note_unused(
        self, given: Mapping[str, Any], known: Iterable[str], no_meaning: Mapping[str, str], where: str
    ) -> None:
        """Note the keys that change nothing: those of ``no_meaning``, and those that llama-swap has not."""
        for key, value in given.items():
            place = f"{where}.{key}" if where else str(key)
            if key in no_meaning and value not in _EMPTY:
                self._notes.append(f"{place}: {no_meaning[key]}.")
            elif key not in known:
                note = f"{place}: llama-swap has no such key, and it changes nothing."
                self._notes.append(note + _similar(str(key), known))

    # -- checks: a fault is kept, and reading goes on with what stands for nothing -----------------

    def _mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] | None = None
        with self._faults.gathering():
            found = _mapping(value, where)
        return found or {}

    def _list(self, value: Any, where: str) -> list[Any]:
        found: list[Any] | None = None
        with self._faults.gathering():
            found = _list(value, where)
        return found or []

    def _number(self, value: Any, where: str, least: float) -> float:
        found = least
        with self._faults.gathering():
            found = _number(value, where, least)
        return max(found, least)


_Group = tuple[frozenset[str], bool, bool, bool]
"""Members; whether one of them runs at a time, others leave for it, and it never leaves for others."""

_EMPTY: tuple[Any, ...] = (None, "", 0, False, {}, [])


def _similar(name: str, known: Iterable[str]) -> str:
    hint = nearest(name, known, cutoff=0.7)
    return f" {hint}" if hint.startswith("Did") else ""


def _without_model(parameters: Any, where: str) -> dict[str, Any]:
    return {
        str(key): each for key, each in _mapping(parameters, where).items() if key not in ("model", "model?")
    }


def _match_rule(given: Any, where: str) -> MatchRule:
    rule = _mapping(given, where)
    return MatchRule(str(rule.get("key")), str(rule.get("match")), _without_model(rule.get("set"), where))


def _aliases(name: str, given: Sequence[Any], filters: RequestFilters) -> list[str]:
    """Return the further names: aliases, which may be mappings with an ``id``, and those of filters."""
    names = [str(each.get("id")) if isinstance(each, Mapping) else str(each) for each in given]
    return [each for each in dict.fromkeys([*names, *filters.set_by_name]) if each != name]


# commands

_OWN_URL = re.compile(r"http://(?:localhost|127\.0\.0\.1|\[::1\]):\$\{PORT\}/?")


def _address(proxy: str) -> str:
    """Return where the command listens; empty where that is ``${PORT}`` of this machine."""
    return "" if _OWN_URL.fullmatch(proxy) else proxy.rstrip("/")


def _port(url: str) -> str:
    """Return the port of an address with one."""
    return url.partition("://")[2].partition("/")[0].rpartition(":")[2]


def _uncommented(text: Any) -> str:
    return without_comments(str(getattr(text, "lines", text)))


def split_command(text: str, where: str) -> list[str]:
    """Return the words of a command without its comments; a backslash joins lines."""
    words = split_words(text, where)
    if not words:
        raise ConfigError(f"{where} is empty", hint="Expected the command that starts the model's server.")
    return words


# macros

_MACRO = re.compile(r"\$\{((?:env\.)?[A-Za-z0-9_-]+)\}")


class _Macros:
    """Puts macros in: those of the file and of one model, ``${MODEL_ID}`` and ``${env.NAME}``."""

    def __init__(self, values: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._values = values
        self._environment = environment

    def fill_command(self, text: Any, where: str) -> str:
        """Return the command with all macros put in, without its comments and those of its macros."""
        if isinstance(text, list | Mapping):
            raise ConfigError(f"{where} = {text!r}", hint="Expected the command as one text, as in a shell.")
        return self._filled(_uncommented(text), where, (), clean=_uncommented) if text else ""

    def fill(self, value: Any, where: str, *, keeps_unknown: bool = False) -> Any:
        """Return the value with all macros put in.

        A text that is one macro alone becomes its value, of any type. With ``keeps_unknown`` a text with an
        unknown macro stays as it is; else ConfigError.
        """
        if isinstance(value, Mapping):
            return {self.fill(key, where): self.fill(each, f"{where}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [self.fill(each, where, keeps_unknown=keeps_unknown) for each in value]
        if not isinstance(value, str) or (keeps_unknown and not self._knows_all(value)):
            return value
        whole = _MACRO.fullmatch(value)
        if whole and whole[1] not in LEFT_TO_US:
            return self._value(whole[1], where, ())
        return self._filled(value, where, ())

    def _knows_all(self, text: str) -> bool:
        return all(name in self._values or name.startswith("env.") for name in _MACRO.findall(text))

    def _filled(
        self, text: str, where: str, above: tuple[str, ...], clean: Callable[[str], str] = str
    ) -> str:
        def replacement(found: re.Match[str]) -> str:
            return (
                found[0] if found[1] in LEFT_TO_US else _written(self._value(found[1], where, above, clean))
            )

        return _MACRO.sub(replacement, text)

    def _value(self, name: str, where: str, above: tuple[str, ...], clean: Callable[[str], str] = str) -> Any:
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
        if isinstance(value, str):
            return self._filled(clean(value), where, (*above, name), clean)
        return self.fill(value, where) if isinstance(value, Mapping | list) else value


def _written(value: Any) -> str:
    """Return a macro's value as it stands in a text: a truth value is written as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    """Return the number, which a macro or a variable may have as text."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise ConfigError(f"{where} = {value!r}", hint=f"Expected a number, {least:g} or more.")
    return value
