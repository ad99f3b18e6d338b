"""The modules that processes of a deployment need, and that their fork server has imported before.

None of these modules starts a thread, opens a file or draws a random number at its import: processes that are
forked would share that.
"""

from __future__ import annotations

FIRST = (
    "runpy",
    "uvloop",
    "dynaplan.http.client",
    "dynaplan.util.clock",
    "dynaplan.process.process_table",
    "dynaplan.store.etcd",
    "dynaplan.store.lease_owners",
    "dynaplan.worker.lifecycle",
    "dynaplan.worker.routers",
    "dynaplan.worker.hosting",
    "dynaplan.graph.loading",
    "dynaplan.planner.service",
    "dynaplan.services",
    "dynaplan.gateway.server",
)
"""The modules that every one of them imports, or a Frontend, for which the first answer waits: none is forked
before."""

WITH = {
    "NATS_SERVER": ("dynaplan.store.nats_client",),
    "DYN_FILE_KV": ("dynaplan.store.file_store",),
}
"""The modules that processes import for which such a variable is not empty. NATS' client is much of what is
imported, and most deployments have none."""

THEN = (
    "dynaplan.fleet.deployment_metrics",
    "dynaplan.webui.routes",
    "dynaplan.events.nats_messenger",
    "dynaplan.worker.engine_worker",
    "dynaplan.engines.held_hand_offs",
    "dynaplan.engines.sim.api",
    "dynaplan.engines.sim.kv_transfer",
    "dynaplan.engines.sim.openai_endpoints",
    "dynaplan.engines.sim.profiles",
    "dynaplan.engines.sim.engine",
    "encodings.idna",
    "dynaplan.planner.assembly",
    "dynaplan.planner.virtual.connector",
    "dynaplan.process.heartbeats",
    "dynaplan.planner.metrics.worker_loads",
    "dynaplan.planner.recorders.decision_log",
    "dynaplan.planner.recorders.tensorboard",
)
"""The modules that some workers import, those of most first. One that is wanted earlier imports the rest."""
