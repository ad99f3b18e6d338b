"""The KV router in a deployment without any server: two frontends that route by what the engines tell."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.polling import wait_until

Deploy = Callable[..., Deployment]

OPTIONS = (
    *("--store", "file", "--Planner.no-operation=true"),
    *("--Router.router=kv", "--Router.router-replica-sync=true"),
    *("--Frontend.ServiceArgs.workers=2", "--VllmWorker.ServiceArgs.workers=2"),
)


BLOCK_TOKENS = 64
"""As graphs/agg_router.yaml says."""

THINKING_S = 0.1
"""Time between an answer and the next question. Frontends hear of each other's ends in milliseconds: a
question that is faster may be routed past a booking that has ended."""


class Conversation:
    """A conversation that grows turn by turn, as a client sends it: whole, with every question."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self._url = deployment.url
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": f"You assist {name}. " * 100}]

    def ask(self, question: str) -> tuple[int, int]:
        """Return the tokens of the prompt, and of them the ones that were cached."""
        time.sleep(THINKING_S)
        self._messages.append({"role": "user", "content": question})
        body = json.dumps({"model": MODEL, "messages": self._messages, "max_tokens": 8}).encode()
        with urllib.request.urlopen(f"{self._url}/v1/chat/completions", body, timeout=20) as response:
            answer = json.load(response)
        self._messages.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def known_blocks(deployment: Deployment) -> list[int]:
    """The blocks of KV cache that each frontend knows of."""
    found = []
    for frontend in deployment.workers("Frontend").values():
        with urllib.request.urlopen(f"{frontend['url']}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        found += [
            int(float(line.split()[-1])) for line in lines if line.startswith("dynaplan:kv_index_blocks")
        ]
    return found


def sources(deployment: Deployment) -> set[str]:
    """Say of all workers and frontends how the one knows what the other has cached."""
    status = json.loads(deployment.run("status", "--namespace", deployment.namespace, "--json").stdout)
    known = status["routing"]
    if len(known) < 2 or any(len(by_frontend) < 2 for by_frontend in known.values()):
        return set()
    return {source for by_frontend in known.values() for source in by_frontend.values()}


def test_a_conversation_goes_where_its_beginning_is_cached_and_on_when_that_worker_dies(
    deploy: Deploy,
) -> None:
    deployment = deploy("graphs.agg_router:Frontend", "agg_router.yaml", *OPTIONS)
    wait_until(lambda: sources(deployment) == {"events"})
    conversations = [Conversation(deployment, name) for name in ("anna", "berta", "carl", "dora")]
    first = [each.ask("who are you? " * 20) for each in conversations]
    assert all(cached == 0 for _, cached in first)
    # Events take their time on a busy machine, and until they are there a question may go anywhere.
    blocks = sum(tokens // BLOCK_TOKENS for tokens, _ in first)
    wait_until(lambda: [known >= blocks for known in known_blocks(deployment)] == [True, True])
    later = [each.ask(f"question {turn} " * 20) for turn in range(3) for each in conversations]
    hits = sum(cached for _, cached in later) / sum(tokens for tokens, _ in later)
    assert hits > 0.7, later

    os.kill(deployment.pid_of("dynamo_VllmWorker"), signal.SIGKILL)
    assert all(each.ask("are you still there?")[0] for each in conversations)
    wait_until(lambda: sources(deployment) == {"events"})
    assert deployment.stop() == 0
