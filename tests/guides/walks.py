"""What a test does for the reader of each guide: what it takes for granted, and what cannot be had here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.e2e.deployment import REPOSITORY

ELSEWHERE = {
    "pip": "tox has installed it",
    "podman": "needs a registry of images",
    "kubectl": "needs a cluster; tox -e k8s has one",
    "ssh": "needs another machine",
    "nats": "needs its client",
    "prometheus": "tox -e interop and tox -e k8s run it",
    "dynaplan top": "needs a keyboard; tests/integration/test_cli.py has one",
    "dynaplan pull": "downloads 98 MB; tests/llm/test_readme.py does",
    "export ETCD_": "needs an etcd of one's own; tests/contract has one",
    'eval "$(_DYNAPLAN_COMPLETE=zsh': "needs zsh; tests/unit/cli/test_main.py has its lines",
    "_DYNAPLAN_COMPLETE=fish": "needs fish, likewise",
}
"""The beginnings of commands that no guide can run here, and why."""

SERVING = "dynaplan serve graphs.disagg:Frontend -f disagg.yaml --Planner.adjustment-interval=5"
AGGREGATED = "dynaplan serve graphs.agg:Frontend -f agg.yaml --Planner.adjustment-interval=5"
LOAD = "dynaplan bench --clients 4 --isl 300 --osl 50 --for 5s"
NO_ENGINE = (
    "this engine is not installed; its configuration is read by tests/unit/house/test_guide_commands.py"
)


@dataclass(frozen=True)
class Walk:
    """One guide.

    ``given`` are files that the reader has, by name; one that begins with #! is a program. ``before`` are
    commands that bring about what the guide takes for granted, ``after`` what the reader does meanwhile, by
    the command before. ``instead`` are texts in whose place the reader puts another. ``skipped`` are
    beginnings of commands that cannot run here, with the reason. ``until`` are beginnings of commands that
    go on until Ctrl-C, with a part of what they print.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    until: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}\n' * 5

_SHIPPED = (REPOSITORY / "graphs/disagg.yaml").read_text()
OTHER = _SHIPPED.replace("max-num-batched-tokens: 16384", "max-num-batched-tokens: 8192", 1)

LEARNT = (
    "dynaplan serve graphs.agg:Frontend -f llamacpp.yaml --Planner.policy=sla \\\n"
    "    --Planner.ttft=300 --Planner.itl=30"
)
BY_RATE = "dynaplan serve graphs.disagg:Frontend -f disagg.yaml --Planner.policy=by_rate.py:decide"

WALKS = {
    "api": Walk(before=("dynaplan serve model.gguf",)),
    "box": Walk(
        given={"bin/tell-me": "#!/bin/sh\ncat >> told.txt\n"},
        after={
            "dynaplan serve graphs.agg:Frontend -f agg.yaml --detach": (
                "dynaplan logs serve",
                "dynaplan stop",
            )
        },
    ),
    "engines": Walk(skipped={"DYNAPLAN_VLLM_PYTHON": "needs a GPU"}),
    "event-plane": Walk(
        before=("dynaplan serve graphs.agg:Frontend -f agg.yaml --store file --namespace box",),
        environment={"DYN_FILE_KV": "kv"},
    ),
    "export-kubernetes": Walk(before=(SERVING,)),
    "how-it-decides": Walk(
        instead={
            "--Planner.itl=30": "--Planner.itl=30 --Planner.adjustment-interval=5",
            "llamacpp-tiny": "llamacpp-model",
            "trace.csv": "sinusoid:low=2,high=4,period=60,duration=60",
        },
        after={LEARNT: (LOAD.replace("5s", "75s"),)},
    ),
    "joining": Walk(
        before=(
            "dynaplan serve graphs.hello_world:Frontend",
            "(python backend.py & sleep 2 && python ask.py; kill %1)",
        ),
        skipped={
            "dynaplan serve old_graph": "tox -e interop runs such a graph",
            "dynaplan compat python old_client.py": "tests/e2e/test_joining.py runs such a program",
        },
    ),
    "kubernetes": Walk(
        skipped={
            "dynaplan planner": "needs a cluster; tox -e k8s has one",
        }
    ),
    "llamacpp": Walk(instead={"/path/to/model.gguf": "model.gguf"}),
    "measuring": Walk(
        given={"mooncake.jsonl": MOONCAKE},
        before=(SERVING,),
        instead={"--for 5m": "--for 5s", "--for 10m": "--for 10s"},
    ),
    "one-by-one": Walk(
        instead={"--engine vllm --model /models/llama": "--engine sim"},
        skipped={
            "dynaplan worker --namespace box --advertise-host": "tests/e2e/test_two_hosts.py has two hosts",
            "dynaplan frontend --namespace box --host": "likewise",
            "dynaplan frontend --namespace box --port 8000 --host": "likewise",
        },
    ),
    "orchestrating": Walk(
        given={"scale.sh": "#!/bin/sh\necho decode $NUM_DECODE_WORKERS\n"},
        skipped={
            "ETCD_ENDPOINTS": "needs an etcd; tests/interop/test_dynamo_planner.py has one",
            "DYN_NAMESPACE": "needs Dynamo 1.2.1; tests/interop/test_dynamo_planner.py runs it",
        },
    ),
    "profile-sla": Walk(
        skipped={
            "dynaplan profile-sla --config disagg.yaml": "minutes; tests/e2e/test_profile_sla.py runs it",
            "dynaplan profile-sla --config agg.yaml --estimate": "aiconfigurator is not installed",
            "dynaplan serve": "serves with its result; tests/e2e/test_profile_sla.py does",
            "dynaplan simulate": "likewise",
        },
    ),
    "replay": Walk(
        before=(
            f"{SERVING.replace('=5', '=2')} --Planner.policy=sla",
            LOAD,
            "cp ~/.dynamo/logs/dynamo/planner/*/decisions.jsonl .",
        ),
    ),
    "scaling": Walk(
        given={"other.yaml": OTHER},
        before=(SERVING,),
        instead={
            "dynaplan reload": "dynaplan reload -y",
        },
    ),
    "several-models": Walk(
        given={
            "models.yaml": "Models: {qwen: {engine: sim}, e5: {engine: sim, ttl: 10m}}\n",
            "llama-swap-config.yaml": "models: {a: {cmd: 'llama-server -m model.gguf --port ${PORT}'}}\n",
        },
        before=("cp model.gguf a.gguf", "cp model.gguf b.gguf"),
        instead={" /models/qwen": ""},
    ),
    "several-people": Walk(
        given={"models.yaml": "Models: {qwen: {engine: sim}}\n"},
        instead={"--host 0.0.0.0": "--host 127.0.0.1", "--for 1m": "--for 10s > bench.txt 2>&1 &"},
        after={"dynaplan keys revoke bob": ("sleep 3",)},
        until={"curl -sw": "429 ", "curl -i localhost:8000/v1/models": "401 Unauthorized"},
    ),
    "shared-box": Walk(
        given={
            "train.py": "print('trained')\n",
            "train.sh": "#!/bin/sh\necho trained\n",
            "models.yaml": "Models: {ant: {}}\n",
        },
        skipped={"dynaplan run --at": "waits for the evening"},
    ),
    "sglang": Walk(skipped={"dynaplan serve": NO_ENGINE}),
    "traffic": Walk(
        after={
            "dynaplan serve graphs.agg:Frontend -f agg.yaml --Frontend.record-traffic=traffic.jsonl": (LOAD,)
        }
    ),
    "trtllm": Walk(skipped={"dynaplan serve": NO_ENGINE}),
    "your-own-policy": Walk(
        instead={
            "disagg.yaml --Planner.policy": "disagg.yaml --Planner.adjustment-interval=2 --Planner.policy"
        },
        after={BY_RATE: (LOAD,)},
    ),
    "tutorial": Walk(instead={"--for 90s": "--for 5s", "duration=1800": "duration=300"}),
    "vllm": Walk(skipped={"dynaplan serve": NO_ENGINE}),
    "watching": Walk(
        before=(SERVING,),
        until={"dynaplan status --watch": "GPUs free", "tensorboard": "Press CTRL+C to quit"},
    ),
    "web-page": Walk(before=(SERVING,)),
}

RUNNING = {
    "dynaplan frontend": "the OpenAI API is at",
    "dynaplan worker": "ready: ",
    "dynaplan planner": "INFO",
    "dynaplan orchestrate": "",
}
"""The beginnings of commands that run in a terminal of their own, and a part of what they print first."""
