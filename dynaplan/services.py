"""The stock services, as graphs link them.

Each service's implementation is imported when its process starts, so that a graph loads fast.
"""

from __future__ import annotations

from functools import partial

from dynaplan.config.service_config import known_options
from dynaplan.graph.endpoints import async_on_start
from dynaplan.graph.service import ComponentType, PlannerInterface, depends, dynamo_context, service


@service(
    dynamo={"component_type": ComponentType.PREFILL},
    resources={"gpu": 1},
    options=partial(known_options, "WORKER"),
)
class PrefillWorker:
    """Pulls prompts from the prefill queue, computes their KV blocks and hands them to a decode worker."""

    @async_on_start
    async def start(self) -> None:
        """Start the engine, and pull prompts from the prefill queue."""
        from dynaplan.worker.engine_worker import start_prefill_worker

        await start_prefill_worker(dynamo_context["runtime"])


@service(
    dynamo={"component_type": ComponentType.DECODE},
    resources={"gpu": 1},
    options=partial(known_options, "WORKER"),
)
class VllmWorker:
    """Decodes; with no prefill worker it prefills as well. Serves the engine's own OpenAI API."""

    prefill_worker = depends(PrefillWorker)

    @async_on_start
    async def start(self) -> None:
        """Start the engine and serve its API."""
        from dynaplan.worker.engine_worker import start_decode_worker

        await start_decode_worker(dynamo_context["runtime"])


@service(in_process_of="Frontend", options=partial(known_options, "ROUTER"))
class Router:
    """Chooses the worker of a request.

    It runs inside the Frontend's process, which reads this service's options, so that a choice costs no
    network hop.
    """

    worker = depends(VllmWorker)


@service(in_process_of="Frontend", options=partial(known_options, "PROCESSOR"))
class Processor:
    """Checks requests, and decides where their prefill is computed.

    It runs inside the Frontend's process, which reads this service's options, so that a token takes one
    network hop.
    """

    router = depends(Router)
    worker = depends(VllmWorker)


@service(dynamo={"component_type": ComponentType.FRONTEND}, options=partial(known_options, "FRONTEND"))
class Frontend:
    """The OpenAI-compatible HTTP API, on the public port; Processor and Router live in its process."""

    planner = depends(PlannerInterface)
    processor = depends(Processor)

    @async_on_start
    async def start(self) -> None:
        """Listen on the public port and answer requests with the workers of the graph."""
        from dynaplan.fleet.deployment_metrics import DeploymentMetrics
        from dynaplan.gateway.server import collect_garbage_seldom, start_frontend
        from dynaplan.webui.routes import make_page

        runtime = dynamo_context["runtime"]
        await start_frontend(runtime, make_page, DeploymentMetrics(runtime))
        collect_garbage_seldom()
