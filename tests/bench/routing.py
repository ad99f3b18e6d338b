"""CPU that a frontend spends on a request, by router and by length of the prompt."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import uvloop

from tests.bench.deployments import INSTANT, cpu_s, serving
from tests.bench.load import generate
from tests.bench.table import Row
from tests.e2e.deployment import MODEL

REQUESTS = 2000
CONCURRENCY = 64
TOKENS = 32
PROMPT_TOKENS = (200, 3000)
ROUTERS = ("round-robin", "kv")


def rows(repeats: int) -> Iterator[Row]:
    """Two instant workers, streams of 32 tokens, 64 at once."""
    for router in ROUTERS:
        options = (f"--Router.router={router}", "--VllmWorker.ServiceArgs.workers=2", *INSTANT)
        with serving("graphs.agg_router:Frontend", "agg_router.yaml", *options) as deployment:
            frontend = [psutil.Process(deployment.pid_of("dynamo_Frontend"))]
            for tokens in PROMPT_TOKENS:
                uvloop.run(generate(deployment.url, MODEL, 300, CONCURRENCY, TOKENS, tokens))
                costs_ms = []
                for _ in range(repeats):
                    before_s = cpu_s(frontend)
                    result = uvloop.run(
                        generate(deployment.url, MODEL, REQUESTS, CONCURRENCY, TOKENS, tokens)
                    )
                    assert result.failures == 0, f"{result.failures} of {result.requests} failed"
                    costs_ms.append(1000 * (cpu_s(frontend) - before_s) / result.requests)
                yield Row(f"frontend CPU per request, {router}, prompts of {tokens} tokens", "ms", costs_ms)
