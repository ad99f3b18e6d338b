"""A frontend that has run out of file descriptors says so, instead of that no worker is there."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.frontend_runtime import stage


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    spare: list[int] = []
    while not spare or spare[-1] <= highest:  # fill the gaps
        spare.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1] + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in spare:
            os.close(descriptor)


async def test_running_out_of_descriptors_is_a_503_of_its_own_and_passes() -> None:
    """The client's connection is kept from one request to the next; the worker's is a new one each time."""
    async with stage() as here:
        await here.worker(card={"keep_alive": False})
        assert (await here.post())[0] == 200
        with no_descriptor_left():
            status, text = await here.post()
        assert status == 503
        assert json.loads(text)["error"]["code"] == "out_of_descriptors"
        assert "ulimit -n" in text
        assert (await here.post())[0] == 200


async def test_a_first_request_that_meets_no_descriptor_is_a_503_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs of the engine's API is imported when the first request comes."""
    monkeypatch.delitem(sys.modules, "dynaplan.engines.trtllm", raising=False)
    async with stage() as here:
        await here.worker(card={"engine": "trtllm"})
        assert (await here.get("/health"))[0] == 200
        with no_descriptor_left():
            status, text = await here.post()
        assert (status, json.loads(text)["error"]["code"]) == (503, "out_of_descriptors")
        assert (await here.post())[0] == 200
