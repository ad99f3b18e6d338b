from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaplan.config.settings.events import COMPAT_VARIABLE
from dynaplan.graph.compat import FOLDER, compat_environment, enable_compat
from dynaplan.util.errors import ConfigError

NAMES = """
from dynamo.sdk import (DYNAMO_IMAGE, AbstractService, abstract_endpoint, api, async_on_start, depends,
    dynamo_context, endpoint, liveness, on_shutdown, readiness, service)
from dynamo.sdk.core.protocol.interface import ComponentType, DynamoTransport
from dynamo.sdk.lib.config import ServiceConfig
from dynamo._core import DistributedRuntime, VirtualConnectorClient
from dynamo.runtime.logging import configure_dynamo_logging
import dynaplan.sdk
assert dynamo_context is dynaplan.sdk.dynamo_context and endpoint is dynaplan.sdk.endpoint
"""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(FOLDER)])


def test_the_modules_are_there_only_where_they_were_asked_for() -> None:
    enable_compat({})
    assert str(FOLDER) not in sys.path
    enable_compat({COMPAT_VARIABLE: "dynamo"})
    enable_compat({COMPAT_VARIABLE: "dynamo"})
    assert sys.path.count(str(FOLDER)) == 1


def test_an_api_that_there_is_not_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--compat dynamos: there is no such API\n  Did you mean 'dynamo'"):
        enable_compat({COMPAT_VARIABLE: "dynamos"})


def test_a_program_of_its_own_finds_the_names_of_the_original_and_keeps_its_search_path(
    tmp_path: Path,
) -> None:
    environment = compat_environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert environment["PYTHONPATH"] == f"{FOLDER}{os.pathsep}{tmp_path}"
    assert subprocess.run([sys.executable, "-c", NAMES], env=environment).returncode == 0


APP = """
from types import SimpleNamespace
from dynamo.sdk import service

def app(*paths):
    return SimpleNamespace(routes=[SimpleNamespace(path=path) for path in ("/docs", "/openapi.json", *paths)])

@service(dynamo={"namespace": "a"}, app=app(), traffic={"timeout": 3}, image="none")
class Quiet: pass

@service(dynamo={"namespace": "a"}, app=app("/mine"))
class Loud: pass
assert Quiet.config.namespace == "a"
"""


def test_routes_of_an_app_that_are_not_served_are_named() -> None:
    run = subprocess.run(
        [sys.executable, "-c", APP], env=compat_environment(os.environ), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "Warning: /mine of a FastAPI app is not served: make it an @api method\n"
