"""The launch: the facts of one deployment, handed from ``serve`` to the fleet plugin in a private file.

circus gives a plugin only flat strings, on its command line, which every user of the machine can read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.gpus import Gpu, GpuShare
from dynaplan.domain.graph import GraphSpec, ServiceSpec
from dynaplan.domain.identity import ProcessIdentity
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.settings.planner import VIRTUAL
from dynaplan.domain.settings.worker import ProcessSettings
from dynaplan.foundation.sockets import url_of
from dynaplan.options.service_config import section_options

LAUNCH_FILE = "launch.json"
ENDPOINT_SOCKET, EVENTS_SOCKET = "circus.sock", "circus-events.sock"


@dataclass(frozen=True)
class Launch:
    """One deployment: its graph, its GPUs, its addresses and its directories.

    ``is_protected`` says whether the Frontend asks for a key; ``drain_timeout_s`` is how long requests
    may take to finish when everything ends, ``leave_timeout_s`` when one worker leaves and the others go on.
    ``scratch_dir`` is where workers keep files of their own while they live. ``uses_busy_gpus``: GPUs that
    other programs use are used, too. ``address_dir`` is the path by which sockets in ``runtime_dir`` are
    addressed: its own where that is short, else a link's. ``is_tls``: the public port speaks https.
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

    def leave_timeout_of(self, component: str) -> float:
        """The seconds that a worker of this service may take to leave: its ``drain-deadline``, if set."""
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

    @property
    def gpu_share(self) -> GpuShare | None:
        """The part of its share in the box's GPUs that never changes; None when they are not shared."""
        planner = next((each.name for each in self.graph.services if each.role is Role.PLANNER), "")
        given = self.settings_of(planner) if planner else {}
        known = [given.get("gpu-priority"), given.get("reserved-gpus")]
        if known == [None, None] or not self.gpus:
            return None
        priority, reserved = (int(number or 0) for number in known)
        visible = frozenset(gpu.uuid for gpu in self.gpus)
        return GpuShare(self.namespace, self.arbiter.pid, priority, reserved, visible)

    def _process(self, component: str) -> ProcessSettings:
        given = {key: value for key, value in self.settings_of(component).items() if value is not None}
        try:
            return ProcessSettings.from_options({"drain-deadline": self.leave_timeout_s, **given})
        except ConfigError:  # Of a service of the user's own, for which these keys mean something else.
            return ProcessSettings(drain_deadline_s=self.leave_timeout_s)

    @property
    def namespace(self) -> str:
        """The namespace, by which commands name the deployment."""
        return self.graph.namespace

    @property
    def plugin_name(self) -> str:
        """The name of the fleet plugin's watcher."""
        return f"{self.namespace}_fleet"

    @property
    def frontend_url(self) -> str:
        """The Frontends' base address for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return url_of(host, self.port, is_tls=self.is_tls)

    def to_json(self) -> str:
        """Write the launch file, which the fleet plugin reads in its own process."""
        return json.dumps(
            asdict(self), default=lambda value: value.value if isinstance(value, Enum) else str(value)
        )

    @classmethod
    def from_json(cls, text: str) -> Launch:
        """Read what ``to_json`` wrote; KeyError, TypeError or ValueError for another text."""
        document = json.loads(text)
        graph = document["graph"]
        services = tuple(map(_service_from, graph["services"]))
        names = ("runtime_dir", "log_dir", "statefile", "scratch_dir", "address_dir")
        paths = {name: Path(document[name]) for name in names}
        return cls(
            **{
                **document,
                **paths,
                "graph": GraphSpec(**{**graph, "services": services}),
                "gpus": tuple(Gpu(**each) for each in document["gpus"]),
                "arbiter": ProcessIdentity(**document["arbiter"]),
            }
        )


def _service_from(document: dict[str, Any]) -> ServiceSpec:
    """Return the service that ``to_json`` wrote; JSON has no tuples."""
    public = tuple(document.get("public_endpoints", ()))
    return ServiceSpec(**{**document, "role": Role(document["role"]), "public_endpoints": public})
