"""The modules that processes of a deployment need, and that their fork server has imported before.

None of these modules starts a thread, opens a file or draws a random number at its import: processes that are
forked would share that.
"""

from __future__ import annotations

FIRST = (
    "runpy",
    "uvloop",
    "aiohttp",
    "dynaplan.adapters.clock",
    "dynaplan.adapters.local.processes",
    "dynaplan.adapters.stores.etcd",
    "dynaplan.adapters.stores.file.owners",
    "dynaplan.runtime.life",
    "dynaplan.runtime.routers",
    "dynaplan.worker.hosting",
    "dynaplan.sdk.graph",
    "dynaplan.planner.service",
    "dynaplan.serving.services",
    "nats",
    "dynaplan.serving.frontend.server",
)
"""The modules that every one of them imports, or a Frontend, for which the first answer waits: none is forked
before."""

THEN = (
    "dynaplan.adapters.messaging.jetstream",
    "dynaplan.adapters.messaging.nats",
    "dynaplan.serving.workers.engine_worker",
    "dynaplan.adapters.engines.common.holds",
    "dynaplan.adapters.engines.sim.api",
    "dynaplan.adapters.engines.sim.driver",
    "dynaplan.adapters.engines.sim.kv_transfer",
    "dynaplan.adapters.engines.sim.endpoints",
    "dynaplan.adapters.engines.sim.profiles",
    "encodings.idna",
    "dynaplan.planner.assembly",
    "dynaplan.adapters.connectors.virtual",
    "dynaplan.adapters.local.heartbeats",
    "dynaplan.adapters.metrics.http",
    "dynaplan.adapters.recorders.jsonl",
    "dynaplan.adapters.recorders.tensorboard",
    "psutil",
    "zmq",
    "zmq.asyncio",
    "tornado.ioloop",
    "circus.process",
    "circus.watcher",
    "circus.arbiter",
    "circus.plugins",
    "dynaplan.supervisor.fleet.plugin",
    "dynaplan.supervisor.upkeep.vigil",
    "dynaplan.supervisor.serve",
    "dynaplan.cli.main",
    "dynaplan.cli.starting.serve",
)
"""The modules that some of them import, those of most first; the fleet plugin's and those of ``serve``, which
comes back, last. One that is wanted earlier imports the rest."""

AFTERWARDS = "dynaplan.supervisor.held.afterwards"
"""The module that clears up when the holder was killed."""
