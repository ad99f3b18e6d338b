"""Time limits and intervals of the work queues and of the event plane, in seconds."""

from __future__ import annotations

# Work queues
QUEUE_MAX_AGE_S = 600.0
"""A queue drops work that nobody has acknowledged after this time."""
QUEUE_ACK_WAIT_S = 3.0
"""Work whose worker has died is delivered again after this; a running one reports progress every second."""
QUEUE_LANE_IDLE_S = 30.0
"""A lane's consumer is deleted when nobody has pulled from it for so long; its work stays in the stream."""
QUEUE_CALL_TIMEOUT_S = 2.0
QUEUE_PUT_TIMEOUT_S = 0.7
"""A stream whose files are gone answers no put at all; a caller waits for a second."""
QUEUE_RETRY_S = 0.1
QUEUE_PULL_MIN_S = 0.1
"""The server's consumer learns of a put a moment after it was answered, and would report an empty queue."""
PULL_GRACE_S = 1.0
"""How much later than the server a pull is given up here: the server's report is better than this clock."""
LATE_PROMPT_WAIT_S = 0.1
"""How long a worker with a late prompt in hand waits for one in time: the shortest that JetStream knows. So a
worker that has nothing else computes at most ten late prompts a second."""
LATE_LANE_POLL_S = 1.0
"""One pull of the lane of late prompts, the interval of progress reports for the prompt in hand, and the
pause after an outage."""

# Event plane
EVENT_RETRY_MIN_S, EVENT_RETRY_MAX_S = 0.05, 1.0
EVENT_ANSWER_TIMEOUT_S = 2.0
EVENT_ACK_WAIT_S = 30.0
"""An event of a group that was not acknowledged is delivered again after this."""
EVENT_CLOSE_TIMEOUT_S = 1.0
EVENT_DUPLICATE_WINDOW_S = 120.0
EVENT_PUBLISH_WAIT_MAX_S = 0.1
"""How long a publisher waits for a sender that makes no progress."""
EVENT_PULL_S = 5.0
EVENT_CONSUMER_IDLE_S = 2 * EVENT_PULL_S
"""The server deletes an ephemeral consumer that nobody has pulled from for so long."""
