from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from dynaplan.graph.endpoints import async_on_start, endpoint, on_shutdown, readiness
from dynaplan.graph.service import depends, service
from dynaplan.worker.hosting import DependencyClient, Host, LocalClient, registered_names

events: list[str] = []


@service(dynamo={"component_type": "decode"})
class Worker:
    pass


@service(in_process_of="Front")
class Router:
    worker = depends(Worker)

    def __init__(self) -> None:
        events.append("Router made")

    @async_on_start
    def start(self) -> None:
        events.append("Router started")

    @endpoint
    async def route(self, text: str) -> AsyncIterator[str]:
        yield f"routed {text}"


@service(dynamo={"component_type": "frontend"})
class Front:
    router = depends(Router)
    again = depends(Router)

    def __init__(self) -> None:
        events.append(f"Front made with {type(self.router).__name__}")

    @async_on_start
    async def start(self) -> None:
        async for item in self.router.route("request"):
            events.append(item)

    @on_shutdown
    def stop(self) -> None:
        events.append("Front stopped")

    @readiness
    def is_ready(self) -> bool:
        return True


def host(of: Any) -> Host:
    runtime: Any = SimpleNamespace(worker_token="", discovery=None, client_tls=True)
    return Host(of, runtime)


async def test_services_of_one_process_call_each_other_directly_and_start_in_order() -> None:
    events.clear()
    hosting = host(Front)
    prepared = await hosting.prepare()
    assert events == ["Router made", "Front made with LocalClient", "Router started", "routed request"]
    for hook in prepared.shutdown_hooks:
        hook()
    assert events[-1] == "Front stopped"
    assert [check() for check in prepared.checks["/readyz"]] == [True]
    assert "/healthz" not in prepared.checks
    await hosting.close()


async def test_a_service_with_a_process_of_its_own_is_called_over_the_network() -> None:
    hosting = host(Router)
    await hosting.prepare()
    assert isinstance(hosting._instances["Router"].worker, DependencyClient)
    await hosting.close()
    outside = host(Front)
    await outside.prepare()
    assert isinstance(outside._instances["Front"].router, LocalClient)
    assert isinstance(outside._instances["Router"].worker, DependencyClient)
    await outside.close()


def test_every_worker_registers_something_and_an_engine_always_generate() -> None:
    assert registered_names(Worker) == ("generate",)
    assert registered_names(Router) == ("route",)
    assert registered_names(Front) == ("health",)
