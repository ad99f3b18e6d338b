"""A graph of services, as `serve` and the commands see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dynaplan.config.overrides import MODELS, PREFILL
from dynaplan.graph.lifecycle import Role


class Configured(Protocol):
    """A service, declared or configured."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def role(self) -> Role: ...


def section_name(service: Configured) -> str:
    """Return the place of a service's options as their author writes it: its section, or a model's entry."""
    if not service.model:
        return service.name
    entry = f"{MODELS}.{service.model}"
    return f"{entry}.{PREFILL}" if service.role is Role.PREFILL else entry


@dataclass(frozen=True)
class ServiceSpec:
    """One service of a graph, configuration already merged and validated.

    ``gpus`` is the number of GPUs of one worker: an integer, or a fraction below one for workers
    that share a GPU. ``envs`` are extra environment variables of its workers. A service that runs
    ``in_process_of`` another one has no process of its own (Router and Processor live in Frontend's).
    ``public_endpoints`` are served to users, as ``POST /{name}``. ``model`` is the name of the model that it
    serves, one of several; empty for the services of a deployment of one model. Its workers are there
    when the model is loaded, and ``shares_memory`` says that their GPUs are given out by bytes.
    """

    name: str
    role: Role
    workers: int = 1
    gpus: float = 0
    envs: dict[str, str] = field(default_factory=dict)
    in_process_of: str = ""
    public_endpoints: tuple[str, ...] = ()
    model: str = ""
    shares_memory: bool = False

    @property
    def first_workers(self) -> int:
        """The number of its workers when the deployment starts: none where a model is loaded on request."""
        return 0 if self.model else self.workers


@dataclass(frozen=True)
class GraphSpec:
    """The services to run, entry service first, and how a child finds them again by name.

    ``identifier`` is the import string (``graphs.disagg:Frontend``), ``working_dir`` the absolute
    directory that children run in and import from.
    """

    identifier: str
    working_dir: str
    namespace: str
    services: tuple[ServiceSpec, ...]

    def service(self, name: str) -> ServiceSpec | None:
        return next((service for service in self.services if service.name == name), None)

    def of_role(self, role: Role) -> ServiceSpec | None:
        """Return the first service of that role that is not one of several models'; None without one."""
        return next((each for each in self.services if each.role is role and not each.model), None)

    @property
    def on_demand(self) -> tuple[ServiceSpec, ...]:
        """The services whose models are loaded on request."""
        return tuple(service for service in self.services if service.model)
