"""What the processes of a deployment import, imported once: by the fork server that they are forked from."""

from __future__ import annotations

from importlib import import_module

MODULES = (
    "runpy",
    "uvloop",
    "aiohttp",
    "dynaplan.adapters.clock",
    "dynaplan.adapters.local.processes",
    "dynaplan.adapters.stores.etcd",
    "dynaplan.adapters.stores.file.owners",
    "dynaplan.runtime.life",
    "dynaplan.runtime.process",
    "dynaplan.runtime.routers",
    "dynaplan.runtime.server",
    "dynaplan.worker.hosting",
    "dynaplan.sdk.graph",
    "dynaplan.planner.service",
    "dynaplan.serving.services",
    "encodings.idna",
    "nats",
    "dynaplan.adapters.messaging.jetstream",
    "dynaplan.adapters.messaging.nats",
    "dynaplan.serving.workers.engine_worker",
    "dynaplan.adapters.engines.sim.api",
    "dynaplan.adapters.engines.common.holds",
    "dynaplan.adapters.engines.sim.driver",
    "dynaplan.adapters.engines.sim.kv_transfer",
    "dynaplan.adapters.engines.sim.endpoints",
    "dynaplan.adapters.engines.sim.profiles",
    "dynaplan.serving.prefill.puller",
    "dynaplan.serving.frontend.server",
    "dynaplan.serving.frontend.requests",
    "dynaplan.serving.routing.worker_router",
    "dynaplan.planner.assembly",
    "dynaplan.adapters.connectors.virtual",
    "dynaplan.adapters.local.heartbeats",
    "dynaplan.adapters.metrics.http",
    "dynaplan.adapters.recorders.jsonl",
    "dynaplan.adapters.recorders.tensorboard",
)
"""The modules that workers, Frontends and planners import, those of all of them first.

None of them starts a thread, opens a file or draws a random number: what is forked would share that.
"""


def preload() -> None:
    """Import all of them."""
    for name in MODULES:
        import_module(name)
