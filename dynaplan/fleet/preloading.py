"""The modules that processes of a deployment need, and that their fork server has imported before.

None of these modules starts a thread, opens a file or draws a random number at its import: processes that are
forked would share that.
"""

from __future__ import annotations

FIRST = (
    "runpy",
    "uvloop",
    "aiohttp",
    "dynaplan.util.clock",
    "dynaplan.process.process_table",
    "dynaplan.store.etcd",
    "dynaplan.store.file.owners",
    "dynaplan.worker.life",
    "dynaplan.worker.routers",
    "dynaplan.worker.hosting",
    "dynaplan.graph.graph",
    "dynaplan.planner.service",
    "dynaplan.services",
    "nats",
    "dynaplan.gateway.server",
)
"""The modules that every one of them imports, or a Frontend, for which the first answer waits: none is forked
before."""

THEN = (
    "dynaplan.events.messaging.jetstream",
    "dynaplan.events.messaging.nats",
    "dynaplan.worker.engine_worker.service",
    "dynaplan.engines.common.holds",
    "dynaplan.engines.sim.api",
    "dynaplan.engines.sim.driver",
    "dynaplan.engines.sim.kv_transfer",
    "dynaplan.engines.sim.endpoints",
    "dynaplan.engines.sim.profiles",
    "encodings.idna",
    "dynaplan.planner.assembly",
    "dynaplan.planner.connectors.virtual",
    "dynaplan.fleet.heartbeats",
    "dynaplan.planner.metrics.http",
    "dynaplan.planner.recorders.jsonl",
    "dynaplan.planner.recorders.tensorboard",
)
"""The modules that some workers import, those of most first. One that is wanted earlier imports the rest."""
