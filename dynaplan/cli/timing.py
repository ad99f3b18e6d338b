"""The times of the commands, in seconds: how often they poll, and how long they wait for an answer.

A poll of the statefile reads one file, and a poll of a key is one request to the store: both are cheap, so
that a command returns at once when all is done. What costs the deployment itself something is polled less.
"""

# Polls until something is done
WORKERS_POLL_S = 0.2
"""The workers in the statefile: restart, reload, reserve."""

AWAKE_POLL_S = 0.1
"""The keys of sleeping workers: wake."""

SERVE_POLL_S = 0.1
"""The ``serve`` that runs, and the heartbeat of its fleet plugin: upgrade."""

NOTICE_POLL_S = 0.1
"""The socket at which a detached ``serve`` says that it is ready; between them, whether it has ended."""

EXIT_POLL_S = 0.1
"""The process of ``serve``: stop."""

# Polls for a screen
SCREEN_POLL_S = 1.0
"""The deployment: top, and ``status --watch``."""

STORE_POLL_S = 2.0
"""The keys of the store, for a screen; the workers' states come from the statefile."""

GPU_POLL_S = 2.0
"""Memory and activity of the GPUs, for a screen."""

SLOW_POLL_S = 5.0
"""What costs the deployment more than the rest, or changes seldom: the frontends' counters, the planner's
decisions, the sources of routing."""

LOG_POLL_S = 0.2
"""The end of the logs: ``logs --follow``."""

LINE_POLL_S = 0.5
"""The counters of ``bench``, for its live line."""

# Waits for one answer
STATUS_STORE_TIMEOUT_S = 2.0
"""The store lists all keys of a deployment: status."""

REMOVALS_TIMEOUT_S = 1.0
"""The store reads one key: why."""

JOIN_STORE_TIMEOUT_S = 3.0
"""The store lists the registrations: a component that joins."""

TOKEN_CHECK_TIMEOUT_S = 2.0
"""A component says whether it knows the token."""

ROUTING_TIMEOUT_S = 1.0
"""A frontend says how it knows what workers have cached."""

HEALTH_TIMEOUT_S = 1.0
"""A worker that has lost its registration says whether it drains."""

METRICS_TIMEOUT_S = 2.0
"""A frontend writes its metrics."""

# Waits for something to be done
GPU_FREE_TIMEOUT_S = 10.0
"""The GPU of a worker is seen to be free, once that worker has left."""

DRAIN_START_TIMEOUT_S = 5.0
"""A worker that is to leave is seen to be draining."""

TAKE_OVER_TIMEOUT_S = 150.0
"""The new ``serve`` is there, or the old one again: a trial of 60 s, and two starts."""

PLUGIN_TIMEOUT_S = 30.0
"""The new fleet plugin keeps the workers."""

SIGNAL_GAP_S = 0.5
"""Between the two signals of ``stop --now``; the second one ends the waiting for requests."""
