"""Remote prefills go to the prefill worker that has the conversation cached, and on when it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.deployment import Deployment
from tests.e2e.test_kv_routing import Conversation
from tests.e2e.traces import in_torture
from tests.fakes.polling import wait_until

OPTIONS = (
    *("--Planner.no-operation=true", "--gpus", "4", "--Router.router=kv"),
    *("--VllmWorker.max-prefill-queue-size=50", "--PrefillWorker.ServiceArgs.workers=2"),
    *("--VllmWorker.ServiceArgs.workers=2", "--PrefillWorker.speedup-ratio=0.2"),
)


def counted(deployment: Deployment, name: str) -> float:
    """A sum over the frontend's samples of that name."""
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M)))


def is_told(deployment: Deployment) -> bool:
    """Whether the frontend hears both decode workers."""
    status = json.loads(deployment.run("status", "--namespace", deployment.namespace, "--json").stdout)
    known = [source for by_frontend in status["routing"].values() for source in by_frontend.values()]
    return known == ["events"] * 2


@in_torture
def test_conversations_find_their_prefill_worker_and_lose_nothing_when_it_is_killed(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.disagg_router:Frontend", "disagg_router.yaml", *OPTIONS)
    wait_until(lambda: is_told(deployment))
    conversations = [Conversation(deployment, f"number {index}") for index in range(8)]
    for each in conversations:
        each.ask("who are you? " * 100)
    assert counted(deployment, "dynamo_frontend_cached_tokens_sum") == 0, "nobody had any of it cached"

    prompts = sum(each.ask("and then? " * 100)[0] for each in conversations)
    assert counted(deployment, "dynamo_frontend_cached_tokens_sum") > 0.6 * prompts

    with ThreadPoolExecutor(len(conversations)) as pool:
        asking = [pool.submit(each.ask, "what comes next? " * 300) for each in conversations]
        os.kill(deployment.pid_of("dynamo_PrefillWorker"), signal.SIGKILL)
        assert all(each.result(30)[0] for each in asking)
    assert deployment.stop() == 0
