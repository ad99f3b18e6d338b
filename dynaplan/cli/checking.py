"""What a child process would refuse, refused by ``serve`` before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.fleet import Role

if TYPE_CHECKING:
    from dynaplan.domain.graph import GraphSpec
    from dynaplan.sdk.graph import Graph

Options = Mapping[str, Any]


def check_settings(graph: Graph, spec: GraphSpec, config: Mapping[str, dict[str, Any]]) -> None:
    """Read the stock services' options as their processes will; ConfigError names service, key and value."""
    from dynaplan.sdk.service_config import ServiceConfig

    sections = ServiceConfig(config)
    for each in spec.services:
        service = graph.service(each.name)
        check = CHECKS.get(each.role)
        if check is None or not service.options:
            continue
        try:
            check(sections.get_parsed_config(each.name) | {"namespace": spec.namespace})
        except ConfigError as error:
            raise ConfigError(f"{each.name}: {error.args[0]}", hint=error.hint) from error


def _check_engine(options: Options) -> None:
    from dynaplan import wiring

    wiring.check_engine(str(options.get("engine", "sim")), options)


def _check_planner(options: Options) -> None:
    import click

    from dynaplan.planner.run import settings_of

    settings_of(options)
    if options.get("environment") == "kubernetes":
        click.echo("Warning: Planner.environment: kubernetes means local here: it scales this box", err=True)


CHECKS: Mapping[Role, Callable[[Options], None]] = {
    Role.DECODE: _check_engine,
    Role.PREFILL: _check_engine,
    Role.PLANNER: _check_planner,
}
