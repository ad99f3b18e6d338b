"""The planner as a service of a graph."""

from __future__ import annotations

from dataclasses import fields

from dynaplan.domain.settings.fields import option_name, option_type
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.options.tables import Kind, Option, Options
from dynaplan.sdk.context import dynamo_context
from dynaplan.sdk.endpoints import async_on_start
from dynaplan.sdk.interfaces import PlannerInterface
from dynaplan.sdk.service import ComponentType, service

_KINDS = {str: Kind.TEXT, int: Kind.INTEGER, float: Kind.NUMBER, bool: Kind.BOOLEAN}

PLANNER: Options = {
    **{
        option_name(each): Option(_KINDS[option_type(each)], each.metadata["about"], each.metadata["least"])
        for each in fields(PlannerSettings)
    },
    "backend": Option(Kind.TEXT, "Of the original; has no effect"),
}


@service(dynamo={"component_type": ComponentType.PLANNER}, options=PLANNER)
class Planner(PlannerInterface):
    """Watches the load and writes the desired numbers of workers."""

    @async_on_start
    async def start(self) -> None:
        """Start the planning loop, and go on: it runs beside the endpoints, not before them."""
        from dynaplan.planner.assembly import start_planner

        await start_planner(dynamo_context["runtime"])
