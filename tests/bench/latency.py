"""What the frontend adds to an engine's times, and for how long it keeps all other streams waiting.

Added are the differences of the percentiles through the frontend and at the engine directly, in rounds that
alternate. The standstill is the longest turn of the frontend's loop, in CPU time, beside streams that go on
(``held_loop``): what other programs take of a busy machine is not in it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from dynaplan.util.sockets import free_port
from tests.bench.data_path import measure, program, wait_for
from tests.bench.data_path.workers import MODEL
from tests.bench.table import Row

PYTHON = (sys.executable, "-m")
STEP_MS = 10.0
STREAMS = (1, 16, 64)
TOKENS = 64
REQUESTS_OF_A_STREAM = 6

BACKGROUND_STREAMS = 32
BACKGROUND_TOKENS = 4000
"""Of each: 40 s, in which the frontend is kept busy otherwise."""

SETTLED_S = 1.0
"""Time after which every stream of the background has its connection."""

AT_ONCE = 100
READINGS = 20
BODY_BYTES = 10_000_000


def rows(repeats: int) -> Iterator[Row]:
    """Added TTFT and ITL, and standstills."""
    with ExitStack() as stack:
        workers = [free_port(), free_port()]
        serve = (*PYTHON, "tests.bench.data_path.workers", *map(str, workers), str(STEP_MS))
        stack.enter_context(program(serve))
        wait_for(workers[0])
        yield from _added(stack, workers, repeats)
        yield from _standstills(stack, workers, repeats)


def _added(stack: ExitStack, workers: Sequence[int], repeats: int) -> Iterator[Row]:
    port = free_port()
    frontend = (*PYTHON, "tests.bench.data_path.frontend", str(port), "{}", *map(str, workers))
    stack.enter_context(program(frontend))
    wait_for(port)
    for streams in STREAMS:
        added: dict[str, list[float]] = {}
        for _ in range(repeats):
            requests = streams * REQUESTS_OF_A_STREAM
            _, direct = measure(workers[0], None, streams, TOKENS, requests)
            _, via = measure(port, None, streams, TOKENS, requests)
            for times in ("ttft", "itl"):
                pairs = zip(via[f"{times}_ms"], direct[f"{times}_ms"], strict=True)
                for percentile, (seen_ms, own_ms) in zip(("p50", "p99"), pairs, strict=True):
                    added.setdefault(f"{times.upper()} {percentile}", []).append(seen_ms - own_ms)
        for name, values in added.items():
            aim = {"TTFT p50": 0.5, "ITL p50": 0.2}.get(name)
            yield Row(f"added {name}, {streams} streams", "ms", values, aim)


def _standstills(stack: ExitStack, workers: Sequence[int], repeats: int) -> Iterator[Row]:
    port = free_port()
    frontend = (*PYTHON, "tests.bench.held_loop", str(port), "{}", *map(str, workers))
    process = stack.enter_context(program(frontend))
    wait_for(port)
    load = (*PYTHON, "tests.bench.data_path.load", str(port), str(BACKGROUND_STREAMS))
    cases: dict[str, Callable[[], None]] = {
        "nothing else": lambda: time.sleep(SETTLED_S),
        "a body of 10 MB": lambda: _post(port, _long_text()),
        "a body of 10 MB, 100,000 messages": lambda: _post(port, _many_messages()),
        f"{AT_ONCE} connections, each with a request": lambda: _connect(port),
        f"{AT_ONCE} requests at once on kept connections": lambda: _send_at_once(port),
        "readings of /metrics": lambda: _read_metrics(port),
    }
    longest_ms: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        with program((*load, str(BACKGROUND_TOKENS), str(BACKGROUND_STREAMS))) as streams:
            assert streams.stdout
            assert streams.stdin
            assert json.loads(streams.stdout.readline()) == "ready"
            streams.stdin.write("\n")
            streams.stdin.flush()
            time.sleep(SETTLED_S)
            for name, run in cases.items():
                _longest_turn_ms(process)
                run()
                longest_ms[name].append(_longest_turn_ms(process))
    for name, values in longest_ms.items():
        yield Row(f"standstill of other streams: {name}", "ms of CPU", values, 20)


def _longest_turn_ms(frontend: subprocess.Popen[str]) -> float:
    assert frontend.stdin
    assert frontend.stdout
    frontend.stdin.write("\n")
    frontend.stdin.flush()
    return float(frontend.stdout.readline())


def _body(messages: Sequence[str]) -> bytes:
    asked = [{"role": "user", "content": each} for each in messages]
    return json.dumps({"model": MODEL, "messages": asked, "max_tokens": 2, "stream": True}).encode()


def _long_text() -> bytes:
    return _body(["word " * (BODY_BYTES // 5)])


def _many_messages() -> bytes:
    return _body(["word " * 13] * (BODY_BYTES // 100))


def _post(port: int, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"[DONE]" in answer.read()


def _read_metrics(port: int) -> None:
    for _ in range(READINGS):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            answer.read()


def _request() -> bytes:
    body = _body(["Why is the sky blue?"])
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _connect(port: int) -> list[socket.socket]:
    request, opened = _request(), []
    for _ in range(AT_ONCE):
        opened.append(socket.create_connection(("127.0.0.1", port), 60))
        opened[-1].sendall(request)
    _read_all(opened)
    return opened


def _send_at_once(port: int) -> None:
    opened = _connect(port)
    request = _request()
    for each in opened:
        each.sendall(request)
    _read_all(opened)
    for each in opened:
        each.close()


def _read_all(connections: Sequence[socket.socket]) -> None:
    for each in connections:
        seen = b""
        while b"[DONE]" not in seen:
            data = each.recv(65536)
            assert data, seen
            seen += data
