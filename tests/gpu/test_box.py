"""What dynaplan does on a box's own GPUs, driver and engines: ``tox -e gpu``.

The parts follow each other on one deployment: each begins with what the one before has left.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.fakes.polling import wait_until
from tests.gpu.conftest import FREED_S, Box

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

START_UP_S = 900.0
"""The longest time for an engine to load, seconds."""

MEASURABLE_GB = 0.2
"""A CUDA context alone holds more."""

Note = Callable[..., None]


def begin(box: Box, model: str, tokens: int, *, is_stream: bool = False) -> http.client.HTTPResponse:
    """Send a request; the answer is to be read."""
    messages = [{"role": "user", "content": "Go on."}]
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "ignore_eos": True, "messages": messages}
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    url = f"{box.deployment.url}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=START_UP_S))


def ask(box: Box, model: str, tokens: int) -> dict[str, Any]:
    with begin(box, model, tokens) as answer:
        return dict(json.load(answer))


def state(box: Box, model: str) -> str:
    models = box.deployment.get_json("/v1/models")["data"]
    return next(str(each["status"]["value"]) for each in models if each["id"] == model)


def engine_processes(box: Box, model: str) -> list[psutil.Process]:
    """The processes below the worker of a model."""
    return psutil.Process(box.deployment.pid_of(f"dynamo_{model}")).children(recursive=True)


def test_a_model_is_loaded_and_answers(box: Box, note: Note) -> None:
    before_watts, begun_s = box.watts, time.monotonic()
    answer = ask(box, "tested", 4)
    note(first_answer_s=time.monotonic() - begun_s, tokens=answer["usage"]["completion_tokens"])
    note(memory_gb=box.held_gb, free_watts=before_watts, idle_watts=box.watts)
    assert answer["usage"]["completion_tokens"] > 0


def test_its_targets_are_kept_under_load_and_nothing_is_lost(box: Box, note: Note, tmp_path: Path) -> None:
    results = tmp_path / "bench.json"
    load = ("--clients", "4", "--isl", "500", "--osl", "64", "--for", f"{box.engine.load_s:g}s")
    ended = box.deployment.run(
        "bench", "--model", "tested", *load, "--json", str(results), timeout_s=box.engine.load_s + 300
    )
    assert ended.returncode == 0, ended.stderr
    measured = json.loads(results.read_text())[0]
    names = ("requests", "lost", "slo", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms")
    note(**{name: measured[name] for name in names}, watts=box.watts)
    assert measured["lost"] == 0
    assert measured["slo"] >= 0.9


def test_its_steps_are_learnt(box: Box, note: Note) -> None:
    def learnt() -> list[str]:
        return list(json.loads(box.deployment.run("status", "--json").stdout)["learnt"])

    known = wait_until(learnt, 60)
    note(known=" ".join(known))
    assert "learnt from" in known[0]
    if box.engine.load_s >= 60:
        assert "error not known" not in known[0]


def test_a_model_that_leaves_finishes_its_answer_and_gives_its_memory_back(box: Box, note: Note) -> None:
    ask(box, "tested", 1)
    loaded_gb = box.held_gb
    with begin(box, "tested", 400, is_stream=True) as answer:
        assert answer.readline()
        begun_s = time.monotonic()
        unloaded = box.deployment.run("unload", "tested", timeout_s=120)
        note(drained_s=time.monotonic() - begun_s)
        *events, last = [line[5:].strip() for line in answer.read().splitlines() if line[:5] == b"data:"]
    assert unloaded.returncode == 0, unloaded.stderr
    assert last == b"[DONE]"
    assert json.loads(events[-1])["usage"]["completion_tokens"] == 400
    if loaded_gb > MEASURABLE_GB:
        wait_until(lambda: box.held_gb < loaded_gb / 2, FREED_S)
    note(freed_s=time.monotonic() - begun_s, freed_gb=loaded_gb - box.held_gb)


def test_an_engine_that_is_killed_gives_its_gpu_back_and_is_there_again(box: Box, note: Note) -> None:
    ask(box, "tested", 1)
    killed = box.deployment.pid_of("dynamo_tested")
    children, begun_s = engine_processes(box, "tested"), time.monotonic()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not any(each.is_running() for each in children), 60)
    assert ask(box, "tested", 4)["usage"]["completion_tokens"] > 0
    note(again_s=time.monotonic() - begun_s)
    assert box.deployment.run("unload", "tested", timeout_s=120).returncode == 0


def test_a_model_sleeps_wakes_and_is_stopped_to_save_power(box: Box, note: Note) -> None:
    if not box.engine.sleeps:
        pytest.skip(f"{box.engine.name} cannot sleep")
    ask(box, "sleeper", 4)
    note(ready_gb=box.held_gb)
    wait_until(lambda: state(box, "sleeper") == "sleeping", 60)
    note(asleep_gb=box.held_gb, asleep_watts=box.watts)
    begun_s = time.monotonic()
    assert ask(box, "sleeper", 4)["usage"]["completion_tokens"] > 0
    note(woke_s=time.monotonic() - begun_s)
    wait_until(lambda: state(box, "sleeper") == "unloaded", 60)
    note(stopped_gb=box.held_gb, stopped_watts=box.watts)
    why = box.deployment.run("why").stdout
    assert "power-saving-after" in why
