"""The launch: the facts of one deployment, handed from ``serve`` to the fleet plugin in a private file.

circus gives a plugin only flat strings, on its command line, which every user of the machine can read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from dynaplan.config.overrides import Sections, merge_sections
from dynaplan.config.service_config import kebab_keys, section_options
from dynaplan.config.settings.planner import VIRTUAL
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.contract.gpus import Gpu
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import ConfigError
from dynaplan.util.sockets import url_of

LAUNCH_FILE = "launch.json"
RELOADED_FILE = "reloaded.json"
ENDPOINT_SOCKET, EVENTS_SOCKET = "circus.sock", "circus-events.sock"


@dataclass(frozen=True)
class AdjustedOption:
    """An option of a service that the planner has set; ``user_value`` is a person's, None for none."""

    component: str
    option: str
    user_value: Any
    value: int


@dataclass(frozen=True)
class Launch:
    """One deployment: its graph, its GPUs, its addresses and its directories.

    ``is_protected`` says whether the Frontend asks for a key; ``drain_timeout_s`` is how long requests
    may take to finish when everything ends, ``leave_timeout_s`` when one worker leaves and the others go on.
    ``scratch_dir`` is where workers keep files of their own while they live. ``uses_busy_gpus``: GPUs that
    other programs use are used, too. ``address_dir`` is the path by which sockets in ``runtime_dir`` are
    addressed: its own where that is short, else a link's. ``is_tls``: the public port speaks https.
    ``config_file`` (empty without one) and ``overrides`` are what ``config`` was read from; of a deployment
    that ``is_reloaded`` they differ from those of ``serve``, whose environment has the previous settings.
    ``model_memory_bytes`` are what models that are loaded on request may take of each GPU, or of the host; 0
    is all. ``power_caps`` are those of GPUs, as ``parse_power_cap`` reads them. ``adjusted`` are the options
    that the planner has set, whose values ``config`` has.
    """

    graph: GraphSpec
    gpus: tuple[Gpu, ...]
    arbiter: ProcessIdentity
    config: dict[str, dict[str, Any]]
    runtime_dir: Path
    log_dir: Path
    statefile: Path
    circus_endpoint: str
    circus_events: str
    host: str
    port: int
    scratch_dir: Path = Path("/nonexistent")
    is_protected: bool = False
    drain_timeout_s: float = 30.0
    leave_timeout_s: float = ProcessSettings.drain_deadline_s
    uses_busy_gpus: bool = False
    address_dir: Path = Path()
    is_tls: bool = False
    config_file: str = ""
    overrides: tuple[str, ...] = ()
    is_reloaded: bool = False
    model_memory_bytes: int = 0
    power_caps: tuple[str, ...] = ()
    adjusted: tuple[AdjustedOption, ...] = ()

    def leave_timeout_of(self, component: str) -> float:
        """The seconds that a worker of this service may take to leave: its own, or the launch's."""
        return self._process(component).drain_deadline_s or self.leave_timeout_s

    def health_timeout_of(self, component: str) -> float:
        """The seconds without an answer after which a worker of this service is ended; 0 is "never"."""
        return self._process(component).health_timeout_s

    def settings_of(self, component: str) -> dict[str, Any]:
        """Return the configuration of a service as its workers read it, keys in kebab-case."""
        return section_options(self.config, component)

    @property
    def is_carried_out_elsewhere(self) -> bool:
        """True when a program of the user's carries the planner's decisions out, and not the fleet plugin."""
        planners = (each.name for each in self.graph.services if each.role is Role.PLANNER)
        return any(self.settings_of(name).get("environment") == VIRTUAL for name in planners)

    def _process(self, component: str) -> ProcessSettings:
        given = {key: value for key, value in self.settings_of(component).items() if value is not None}
        try:
            return ProcessSettings.from_options({"drain-deadline": self.leave_timeout_s, **given})
        except ConfigError:  # Of a service of the user's own, for which these keys mean something else.
            return ProcessSettings(drain_deadline_s=self.leave_timeout_s)

    @property
    def namespace(self) -> str:
        return self.graph.namespace

    @property
    def circus_log(self) -> Path:
        """The log of ``serve``, circus and libraries."""
        return self.log_dir / "circus.log"

    @property
    def plugin_name(self) -> str:
        return f"{self.namespace}_fleet"

    @property
    def frontend_url(self) -> str:
        """The Frontends' base address for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return url_of(host, self.port, is_tls=self.is_tls)

    def to_json(self) -> str:
        """Return the text of the launch file, which the fleet plugin reads in its own process."""
        return _json_of(self)

    @classmethod
    def from_json(cls, text: str) -> Launch:
        """Read what ``to_json`` wrote; KeyError, TypeError or ValueError for another text."""
        document = json.loads(text)
        graph = _graph_from(document["graph"])
        names = ("runtime_dir", "log_dir", "statefile", "scratch_dir", "address_dir")
        paths = {name: Path(document[name]) for name in names}
        return cls(
            **{
                **document,
                **paths,
                "graph": graph,
                "gpus": tuple(Gpu(**each) for each in document["gpus"]),
                "arbiter": ProcessIdentity(**document["arbiter"]),
                "overrides": tuple(document.get("overrides", ())),
                "power_caps": tuple(document.get("power_caps", ())),
                "adjusted": _adjusted_in(document),
            }
        )


@dataclass(frozen=True)
class Reload:
    """The settings of a ``dynaplan reload``, and what they were read from.

    ``graph`` are its services, where those have changed: models were added or removed.
    ``before`` is not None while that reload is under way, or when it was killed: the settings of workers that
    it has not replaced. ``adjusted`` as in ``Launch``.
    """

    config: dict[str, dict[str, Any]]
    config_file: str = ""
    overrides: tuple[str, ...] = ()
    before: dict[str, dict[str, Any]] | None = None
    graph: GraphSpec | None = None
    adjusted: tuple[AdjustedOption, ...] = ()

    def to_json(self) -> str:
        """Return the text of a reload's file, which the fleet plugin reads whenever it starts a process."""
        return _json_of(self)

    @classmethod
    def from_json(cls, text: str) -> Reload:
        """Read what ``to_json`` wrote; KeyError, TypeError or ValueError for another text."""
        document = json.loads(text)
        graph = _graph_from(document["graph"]) if document.get("graph") else None
        parts = {"overrides": tuple(document["overrides"]), "adjusted": _adjusted_in(document)}
        return cls(**{**document, **parts, "graph": graph})

    def applied_to(self, launch: Launch) -> Launch:
        return replace(
            launch,
            graph=self.graph or launch.graph,
            config=self.config,
            config_file=self.config_file,
            overrides=self.overrides,
            is_reloaded=True,
            adjusted=self.adjusted,
        )


def read_launch(runtime_dir: Path) -> Launch:
    """Return a running deployment's launch, with the settings of its last reload.

    Raises OSError, KeyError, TypeError or ValueError when its file cannot be read.
    """
    launch, last = Launch.from_json((runtime_dir / LAUNCH_FILE).read_text()), last_reload(runtime_dir)
    return last.applied_to(launch) if last else launch


def last_reload(runtime_dir: Path) -> Reload | None:
    """Return the last reload of a deployment; None when there was none, or its file cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Reload.from_json((runtime_dir / RELOADED_FILE).read_text())
    return None


class CurrentLaunch:
    """The launch with the settings of the last reload: looked up at each use, read when the file changes."""

    def __init__(self, launch: Launch) -> None:
        self._launch = self._current = launch
        self._file = launch.runtime_dir / RELOADED_FILE
        self._seen: tuple[int, int] | None = None

    @property
    def now(self) -> Launch:
        """The launch as it is at this moment."""
        try:
            status = self._file.stat()
        except OSError:
            return self._current
        if self._seen != (status.st_mtime_ns, status.st_ino):
            reload = last_reload(self._file.parent)
            self._current = reload.applied_to(self._launch) if reload else self._current
            self._seen = status.st_mtime_ns, status.st_ino
        return self._current


def reapply_adjusted(
    config: Sections, adjusted: Iterable[AdjustedOption], named: Mapping[str, Mapping[str, Any]]
) -> tuple[Sections, tuple[AdjustedOption, ...]]:
    """Return a person's new configuration with the planner's values, and the options that still have one.

    A person's will goes first: an option that is ``named`` for this change, or that the configuration has
    another value for than it had, is no longer the planner's.
    """
    kept = []
    for each in adjusted:
        is_named = each.option in kebab_keys(named.get(each.component) or {})
        if not is_named and section_options(config, each.component).get(each.option) == each.user_value:
            config = merge_sections(config, {each.component: {each.option: each.value}})
            kept.append(each)
    return config, tuple(kept)


def _adjusted_in(document: Mapping[str, Any]) -> tuple[AdjustedOption, ...]:
    return tuple(AdjustedOption(**each) for each in document.get("adjusted", ()))


def _json_of(value: Launch | Reload) -> str:
    return json.dumps(asdict(value), default=lambda each: each.value if isinstance(each, Enum) else str(each))


def _graph_from(document: dict[str, Any]) -> GraphSpec:
    """Return the graph that ``to_json`` wrote."""
    return GraphSpec(**{**document, "services": tuple(map(_service_from, document["services"]))})


def _service_from(document: dict[str, Any]) -> ServiceSpec:
    """Return the service that ``to_json`` wrote; JSON has no tuples."""
    public = tuple(document.get("public_endpoints", ()))
    return ServiceSpec(**{**document, "role": Role(document["role"]), "public_endpoints": public})
