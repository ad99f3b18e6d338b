"""Where a request leads: by path, by fields in it, by method."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.http.route_table import RouteTable
from dynaplan.http.routes import Route


async def handler(request: Any) -> None: ...


def table(*paths: str, method: str = "POST") -> RouteTable:
    made = RouteTable()
    made.add(Route(method, path, handler) for path in paths)
    return made


def test_a_path_without_fields_is_found_before_one_with_them() -> None:
    routes = table("/kv/{id}", "/v1/*", "/kv/own")
    assert routes.find("/kv/own", "/kv/own")["POST"][0].path == "/kv/own"
    assert routes.find("/kv/7", "/kv/7")["POST"][1] == {"id": "7"}
    assert routes.find("/v1/chat/completions", "/v1/chat/completions")["POST"][0].path == "/v1/*"


@pytest.mark.parametrize("target", ["/kv/a%2Fb/take", "/kv/a%2Fb/take?x=1"])
def test_a_field_may_contain_a_slash(target: str) -> None:
    assert table("/kv/{id}/take").find("/kv/a/b/take", target)["POST"][1] == {"id": "a/b"}


@pytest.mark.parametrize("path", ["/kv", "/kv/", "/kv/a/b", "/akv/7", "/v2/x"])
def test_what_no_route_matches_is_not_found(path: str) -> None:
    assert table("/kv/{id}", "/v1/*").find(path, path) == {}


def test_a_path_is_found_by_each_of_its_methods() -> None:
    routes = table("/a", "/b/{c}")
    routes.add([Route("GET", "/a", handler), Route("GET", "/b/{d}", handler)])
    assert set(routes.find("/a", "/a")) == {"GET", "POST"}
    assert [fields for _, fields in routes.find("/b/1", "/b/1").values()] == [{"c": "1"}, {"d": "1"}]
    assert routes.paths == {"/a", "/b/{c}", "/b/{d}"}
