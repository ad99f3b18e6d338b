"""The planner as a service of a graph."""

from __future__ import annotations

from functools import partial

from dynaplan.config.service_config import known_options
from dynaplan.graph.endpoints import async_on_start
from dynaplan.graph.service import ComponentType, PlannerInterface, dynamo_context, service


@service(dynamo={"component_type": ComponentType.PLANNER}, options=partial(known_options, "PLANNER"))
class Planner(PlannerInterface):
    """Watches the load and writes the desired numbers of workers."""

    @async_on_start
    async def start(self) -> None:
        """Start the planning loop, and go on: it runs beside the endpoints, not before them."""
        from dynaplan.planner.assembly import start_planner

        await start_planner(dynamo_context["runtime"])
