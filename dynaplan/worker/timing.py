"""Time limits and intervals of a worker's process, in seconds."""

from __future__ import annotations

# Drain and exit
DRAIN_LINGER_S = 0.25
"""How long an idle worker still answers "draining" to routers that have not heard of it yet, where they are
not asked."""
COUNT_HELD_TIMEOUT_S = 1.5
HELD_POLL_S = 0.05
SHUTDOWN_HOOKS_TIMEOUT_S = 10.0
"""Whatever the drain deadline is."""
STOP_TIMEOUT_S = 40.0
"""For closing, mostly the engine's stop, while the drain deadline leaves room for it."""
STOP_TIMEOUT_MIN_S = 1.0
"""For closing when the deadline is over, or nothing was ever served."""
STOP_TIMEOUT_FAILED_S = 5.0
"""For closing after a failure."""
CLOSE_TIMEOUT_S = 3.0
"""For closing connections at the end; servers may be down."""
CLAIMS_POLL_S = 60.0
"""Between two checks of the GPU claims of a worker that holds them itself."""

# Routers, which are asked while a worker drains
ROUTER_ANSWER_TIMEOUT_S = 1.0
ROUTER_SILENT_S = 2.0
ROUTER_POLL_MIN_S, ROUTER_POLL_MAX_S = 0.05, 0.5

# Calls between workers
FIND_INSTANCE_S = 10.0
"""How long a call waits for an instance that takes it."""
FIND_RETRY_MIN_S, FIND_RETRY_MAX_S = 0.02, 0.5
CONNECT_TIMEOUT_S = 2.0

# Engine workers
SLEEP_POLL_S = 1.0
"""Between two checks whether the engine sleeps; its metrics, which say so, are read as often."""
WAKE_POLL_S = 0.5
"""Between two checks whether somebody wants a sleeping engine awake."""
KV_EVENT_RETRY_MIN_S, KV_EVENT_RETRY_MAX_S = 0.1, 5.0
KV_EVENT_QUIET_S = 0.5
"""Without a change for so long, an event without blocks follows: frontends notice a lost last one."""

# Prefill workers
PREFILL_GET_S = 1.0
"""How long one request to the queue waits for work."""
PREFILL_PROGRESS_S = 1.0
"""Between two reports to the queue that the work goes on."""
PREFILL_RETRY_MIN_S, PREFILL_RETRY_MAX_S = 0.1, 2.0
PREFILL_ANSWER_TIMEOUT_S = 10.0
"""For sending an answer while the queue is down; after that the request is delivered again."""
PREFILL_ASLEEP_POLL_S = 0.2
"""Between two checks whether an engine still sleeps."""
