"""The gateway's intervals and timeouts, in seconds. The options have the ones that a user may change."""

from __future__ import annotations

# The public server

DRAIN_POLL_S = 0.02
"""Time between two checks of a draining frontend whether its last answers have been sent."""

DRAIN_NEXT_REQUEST_S = 1.0
"""Time after an answer, in seconds, in which a draining frontend awaits another request on its connection.

A client on a busy machine sends its next one that late: with 0.25 s, 112 requests of 50 restarts were lost
at a load of 9 for each core.
"""

BACKGROUND_TIMEOUT_S = 2.0
"""Time at the end for messages to workers that no request waits for."""

BODY_READER_TIMEOUT_S = 20.0
"""Time that reading one body may take, the start of the process included."""

BODY_READER_IDLE_S = 60.0
"""Time for which the reading process is kept without work: it holds 15 MB, and frees what bodies took."""

# Workers

AVOID_WORKER_S = 0.25
"""Time for which a worker that refused or died gets no request; after that it is tried again."""

WORKER_RETURN_S = 60.0
"""Time after the last worker has left, or the frontend has started, in which requests still wait for one."""

STALL_LOOK_S = 0.5
"""Time between two looks at which workers are silent."""

STALL_SILENT_S = 1.0
"""Time without a byte from a worker that has requests, after which it is asked whether it lives.

Three steps of the slowest engine that people bear: 3 tokens/s.
"""

STALL_HEALTH_S = 1.0
"""Time in which the server of such a worker must answer; a busy one takes some milliseconds."""

WAKE_RETRY_S = 5.0
"""Time after which a worker that still sleeps is asked again to wake."""

WAKE_REQUEST_TTL_S = 30
"""Lifetime of a request to a worker to wake, whole seconds."""

FIRST_COMMENT_S = 2.0
"""Time after which a client with a stream first hears that its model is being loaded."""

COMMENTS_S = 5.0
"""Time between two such comments."""

DEMAND_INTERVAL_S = 1.0
"""Longest time between two looks at the requests that are answered, for the demand for models."""

DEMAND_REWRITE_S = 10.0
"""Time after which the demand for models is written again although it is the same, in case it was lost."""

DEMAND_DEBOUNCE_S = 0.02
"""Time for which changes of the demand for models gather before they are published."""

SLOT_RELEASE_TIMEOUT_S = 5.0
"""Time for which giving a slot back is tried; a worker takes a forgotten one back by itself."""

WHOLE_ANSWERS_POLL_S = 0.25
"""Time between two estimates of how far the answers without a stream are: some tokens of each."""

# Remote prefill

QUEUE_DEPTH_POLL_S = 0.05
"""Time between two readings of the prefill queue's depth while requests flow."""

QUEUE_BUSY_S = 0.5
"""Requests count as flowing for this long after the last one asked for the depth."""

QUEUE_DEPTH_IDLE_POLL_S = 1.0
"""Time between two readings otherwise; the reading ends when the queue is empty."""

PREFILL_QUEUE_TIMEOUT_S = 1.0
"""Time for which a request waits for the queue to take its prefill.

After a failure no request tries the queue again for the same time.
"""

PREFILL_ANSWER_S = 1.0
"""Time an answer takes to arrive at most: a prefill that left the queue longer ago has lost its answer.

A prefill worker publishes the answer before the work leaves the queue.
"""

WORKER_QUEUE_CLEAR_DELAY_S = 5.0
"""Time after which the queue of a worker that has left is cleared: frontends have moved theirs by then."""

# KV routing

EVENT_PLANE_MAX_BACKOFF_S = 5.0
"""Longest pause between two attempts to reach the event plane, or a worker for its snapshot."""

EVENT_PLANE_POLL_S = 0.2
"""Time between two checks whether the connection to the event plane broke."""

SNAPSHOT_RETRY_S = 0.5
"""Shortest time between two requests for one worker's snapshot."""

SNAPSHOT_TIMEOUT_S = 10.0
"""Time in which a worker must have sent its snapshot."""

INDEX_SWEEP_PAUSE_S = 0.005
"""Pause between two slices of a sweep of the index."""

TOKENS_TIMEOUT_S = 1.0
"""Time that a request waits for its tokens; a prompt of a million tokens takes about a second."""

REPLICA_DEBOUNCE_S = 0.005
"""Time after a message for which changes gather; the first one after a rest is published at once."""

REPLICA_HEARTBEAT_S = 1.0
"""Time between two messages of a frontend that has requests in flight, if nothing changes."""

REPLICA_SILENT_S = 3.5
"""Time without a message after which another frontend's bookings are dropped."""

STORE_TIMEOUT_S = 3.0
"""Time after which a call to the store counts as failed."""

# Keys

KEYS_POLL_S = 1.0
"""Time between two looks whether the file of keys has changed."""

USAGE_INTERVAL_S = 5.0
"""Time for which the usage of keys gathers before it is written."""

# Reports

RECORDING_INTERVAL_S = 1.0
"""Time for which requests gather before they are written together."""
