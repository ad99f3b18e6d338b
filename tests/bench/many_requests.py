"""The frontend's memory after many requests: what it holds must not grow with what it has answered.

Chats with streams of two tokens, from 64 connections at a time that are closed after some requests each.
``DYNAPLAN_REQUESTS`` is how many, a million without it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil

from dynaplan.util.sockets import free_port
from tests.bench.data_path import program, wait_for
from tests.bench.table import Row

REQUESTS = int(os.environ.get("DYNAPLAN_REQUESTS", "1000000"))
SHOWN = (5_000, 50_000, 100_000, 200_000, 300_000, 500_000, 750_000, 1_000_000)
OF_A_ROUND = 5_000
STREAMS = 64
TOKENS = 2

PYTHON = (sys.executable, "-m")


def rows(_: int) -> Iterator[Row]:
    """Resident memory after so many requests, once."""
    with ExitStack() as stack:
        workers = [free_port(), free_port()]
        stack.enter_context(program((*PYTHON, "tests.bench.data_path.workers", *map(str, workers), "0")))
        wait_for(workers[0])
        port = free_port()
        frontend = (*PYTHON, "tests.bench.data_path.frontend", str(port), "{}", *map(str, workers))
        process = psutil.Process(stack.enter_context(program(frontend)).pid)
        wait_for(port)
        begun_s = time.monotonic()
        for answered in range(OF_A_ROUND, REQUESTS + 1, OF_A_ROUND):
            _round(port)
            if answered in SHOWN:
                rate = answered / (time.monotonic() - begun_s)
                mib = process.memory_info().rss / 2**20
                note = f"{rate:.0f} requests/s"
                yield Row(f"resident memory after {answered:,} requests", "MiB", [mib], note=note)


def _round(port: int) -> None:
    load = (*PYTHON, "tests.bench.data_path.load", str(port), str(STREAMS), str(TOKENS), str(OF_A_ROUND))
    with program(load) as process:
        assert process.stdin
        assert process.stdout
        assert json.loads(process.stdout.readline()) == "ready"
        process.stdin.write("\n")
        process.stdin.flush()
        seen = json.loads(process.stdout.readline())
        assert seen["failures"] == 0, seen
