"""A simulated worker of Dynamo 1.6.1: ``python dynamo_worker.py MODEL_DIRECTORY NAME STEP_MS TOKEN_ID``.

Needs ``ai-dynamo`` and imports nothing of dynaplan. Each stream gets that token once in a step.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any


async def main(model: str, name: str, step_s: float, token: int) -> None:
    from dynamo.llm import ModelInput, ModelType, WorkerType, register_model  # type: ignore[import-not-found]
    from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]

    async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        tokens = request["stop_conditions"]["max_tokens"]
        for number in range(1, tokens + 1):
            await asyncio.sleep(step_s)
            yield {"token_ids": [token], **({"finish_reason": "length"} if number == tokens else {})}

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    kind = {"kv_cache_block_size": 16, "worker_type": WorkerType.Aggregated}
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, model, name, **kind)
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1000, int(sys.argv[4])))
