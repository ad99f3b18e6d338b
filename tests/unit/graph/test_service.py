"""What the decorators make of a class, and which edges link() allows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from dynaplan.graph.endpoints import Hook, hooks_of
from dynaplan.graph.lifecycle import Role
from dynaplan.sdk import (
    AbstractService,
    DynamoTransport,
    abstract_endpoint,
    api,
    async_on_start,
    depends,
    endpoint,
    liveness,
    on_shutdown,
    readiness,
    service,
)
from dynaplan.util.errors import GraphError


@dataclass
class Question:
    text: str


@service(
    dynamo={"namespace": "lab", "component_type": "decode"}, resources={"gpu": "2"}, workers=3, traffic={}
)
class Worker:
    @endpoint()
    async def generate(self, request: Question) -> Any:
        yield request

    @endpoint(name="tell")
    async def _load(self) -> int:
        return 1

    @api
    async def chat(self, request) -> None: ...

    @async_on_start
    async def second(self) -> None: ...

    @async_on_start
    async def first(self) -> None: ...

    @on_shutdown
    def bye(self) -> None: ...

    @liveness
    def alive(self) -> bool:
        return True

    @readiness
    def ready(self) -> bool:
        return True


@service
class Caller:
    worker = depends(Worker)


def test_a_service_is_named_after_its_class_and_tells_what_its_decorator_says() -> None:
    assert (Worker.name, Worker.role, Worker.config.namespace) == ("Worker", Role.DECODE, "lab")
    assert (Worker.config.workers, Worker.config.resources) == (3, {"gpu": "2"})
    assert (Caller.role, Caller.config.workers, Caller.config.namespace) == (Role.SERVICE, 1, "")


def test_environment_variables_may_be_given_as_pairs_of_name_and_value() -> None:
    made = service(envs=[{"name": "A", "value": "1"}])(type("Made", (), {}))
    assert made.config.envs == {"A": "1"}


def test_an_unknown_component_type_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"(?s)component_type 'decod'.*'decode'"):
        service(dynamo={"component_type": "decod"})(type("Made", (), {}))


def test_endpoints_have_a_name_a_method_transports_and_a_request_type() -> None:
    found = Worker.endpoints
    assert list(found) == ["generate", "tell", "chat"]
    assert found["tell"].method_name == "_load"
    assert found["generate"].request_type is Question
    assert found["tell"].request_type is None
    assert found["chat"].request_type is type(None) or found["chat"].request_type is None
    assert found["generate"].transports == (DynamoTransport.DEFAULT,)
    assert [name for name, each in found.items() if each.is_public] == ["chat"]


def test_hooks_run_in_the_order_of_definition() -> None:
    assert hooks_of(Worker.inner, Hook.START) == ("second", "first")
    assert hooks_of(Worker.inner, Hook.SHUTDOWN) == ("bye",)
    assert hooks_of(Worker.inner, Hook.LIVENESS) == ("alive",)
    assert hooks_of(Worker.inner, Hook.READINESS) == ("ready",)


def test_a_service_that_subclasses_a_service_keeps_its_endpoints_hooks_and_dependencies() -> None:
    @service
    class Special(Worker):  # type: ignore[misc, valid-type]
        async def second(self) -> None: ...

    @service
    class Other(Caller):  # type: ignore[misc, valid-type]
        pass

    assert issubclass(Special.inner, Worker.inner)
    assert hooks_of(Special.inner, Hook.START) == hooks_of(Worker.inner, Hook.START)
    assert list(Special.endpoints) == list(Worker.endpoints)
    assert Other.link(Special) is Special


def test_link_returns_its_target_and_allows_what_the_class_depends_on() -> None:
    assert Caller.link(Worker) is Worker


def test_link_refuses_what_is_no_dependency() -> None:
    with pytest.raises(ValueError, match="Caller does not fulfill any dependencies required by Worker"):
        Worker.link(Caller)


def test_link_refuses_what_fits_two_dependencies() -> None:
    @service
    class Two:
        one = depends(Worker)
        other = depends(Worker)

    with pytest.raises(
        ValueError, match=r"Worker fulfills multiple dependencies required by Two: \['one', 'other'\]"
    ):
        Two.link(Worker)


def test_link_refuses_what_is_not_a_service() -> None:
    with pytest.raises(ValueError, match="link must be passed a Service, got type"):
        Caller.link(Question)


def test_depends_refuses_what_is_neither_a_service_nor_an_interface() -> None:
    with pytest.raises(
        TypeError, match=r"depends.. expects 'on' to be a ServiceInterface, an AbstractService type"
    ):
        depends(Question)


def test_a_dependency_is_a_description_on_the_class_and_the_bound_client_on_an_instance() -> None:
    instance = Caller.inner()
    assert Caller.inner.worker.on is Worker
    with pytest.raises(GraphError, match=r"(?s)Worker is not linked.*Caller.link\(Worker\)"):
        _ = instance.worker
    assert getattr(instance, "worker", None) is None
    client = object()
    Caller.bind(instance, "worker", client)
    assert instance.worker is client


def test_binding_to_an_attribute_that_is_no_dependency_is_refused() -> None:
    with pytest.raises(GraphError, match=r"(?s)no dependency 'worke'.*'worker'"):
        Caller.bind(Caller.inner(), "worke", object())


class Interface(AbstractService):
    @abstract_endpoint
    async def foo(self, request: Any) -> Any: ...

    @abstract_endpoint()
    async def bar(self, request: Any) -> Any: ...

    @abstract_endpoint()
    async def baz(self, request: Any) -> Any: ...


def test_an_interface_that_is_not_fulfilled_is_refused_with_every_reason() -> None:
    class X(Interface):
        bar = 3

        async def foo(self, request: Any) -> Any: ...

    expected = (
        "X violates Dynamo interface — missing implementation(s): baz; "
        "method(s) not decorated with @endpoint: foo; bar must be callable, got int"
    )
    with pytest.raises(TypeError) as caught:
        service(X)
    assert str(caught.value) == expected


def test_a_service_that_fulfils_an_interface_can_be_linked_in_its_place() -> None:
    @service
    class Asking:
        dependency = depends(Interface)

    @service
    class Answering(Interface):
        @endpoint()
        async def foo(self, request: Any) -> Any: ...

        @endpoint()
        async def bar(self, request: Any) -> Any: ...

        @endpoint()
        async def baz(self, request: Any) -> Any: ...

    assert Asking.link(Answering) is Answering


@pytest.mark.parametrize("module", ["dynaplan.sdk", "dynaplan.services", "graphs.disagg"])
def test_declarations_import_without_servers_yaml_or_an_event_loop(module: str) -> None:
    heavy = ("aiohttp", "yaml", "asyncio", "circus", "nats", "numpy", "tensorboard")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
