"""Time limits and intervals of the stores, in seconds: every call of a store ends within three."""

from __future__ import annotations

STORE_CALL_TIMEOUT_S = 3.0
"""How long a user of a store waits for an answer, whichever store it is."""

CALL_RETRY_MIN_S, CALL_RETRY_MAX_S = 0.1, 2.0
"""Backoff between attempts at one call."""

WATCH_RETRY_MIN_S, WATCH_RETRY_MAX_S = 0.05, 2.0
"""Backoff between attempts to resume a watch."""

# Leases
LEASE_RENEWAL_RETRY_S = 0.25
LEASE_REMAINING_MIN_S = 0.001
"""Remaining time to live below which a renewal cannot be answered in time."""
LEASE_REVOKE_TIMEOUT_S = 2.0
"""After this the lease is left to expire."""

# etcd
ETCD_CALL_TIMEOUT_S = 3.0
ETCD_CONNECT_TIMEOUT_S = 1.5
ETCD_WATCH_SILENCE_S = 30.0
"""A watch silent for so long is resumed on a new connection: whatever has silently cut it, no change is later
than this. TCP keepalive notices earlier that the other machine is gone."""

# NATS
NATS_CONNECT_TIMEOUT_S = 5.0
NATS_REQUEST_TIMEOUT_S = 2.0
NATS_RECONNECT_WAIT_S = 0.15
NATS_PING_INTERVAL_S = 3
"""A server that leaves two pings unanswered is taken for dead."""
BUCKET_CALL_TIMEOUT_S, BUCKET_ANSWER_TIMEOUT_S, BUCKET_CONFLICT_RETRY_S = 2.7, 2.5, 2.5
"""For a whole call, for one answer, and for attempts where others change the same keys all the time."""
BUCKET_RECONNECT_S, BUCKET_RECONNECT_POLL_S = 0.5, 0.02
"""How long a call waits for a lost connection, about as long as a restart takes, and how often it checks."""
BUCKET_CREATE_RETRY_S = 1.5
"""How long a bucket that cannot be created is tried again: a server removes a deleted one's files sooner."""
BUCKET_WATCH_RETRY_MAX_S = 1.0
BUCKET_HEARTBEAT_S = 5.0
BUCKET_SILENCE_S = 2.5 * BUCKET_HEARTBEAT_S
"""A consumer silent for so long is gone: the bucket was deleted, or the server has forgotten it."""
BUCKET_LEASE_GRACE_S = 2.0
"""The server's marker of an expired lease lasts a second: a lease this long overdue is read, if that was
missed."""
BUCKET_SWEEP_MAX_S = 0.25
"""Longest random delay before the keys of an ended lease are deleted: of many processes one does it."""
TOMBSTONE_TTL_S = 600
"""A deleted key's marker stays so long; a watch that begins later reads what is there."""

# Kubernetes
KUBERNETES_CALL_TIMEOUT_S = 2.9
KUBERNETES_WATCH_MIN_S = 1.0
"""A watch that ends earlier is resumed after a pause."""

# Files
FILE_CALL_TIMEOUT_S = 2.9
"""Also when the disk hangs."""
FILE_LOCK_TIMEOUT_S = 2.5
"""For another writer, which takes less than a millisecond unless it hangs."""
FILE_LOCK_RETRY_MIN_S, FILE_LOCK_RETRY_MAX_S = 0.0005, 0.02
FILE_POLL_S = 1.0
"""Between two reads of the changes or of the leases, while the kernel does not report them."""
FILE_UNREPORTED_MAX_S = 10.0
"""Longest delay of a change whose writer was killed between its commit and its report."""
FILE_LEASE_READ_MIN_S = 0.25
"""Between two reads of the leases, however often they change."""
FILE_RECREATE_AFTER_S = 0.1
"""Before a removed store is made again: who removes it may not have finished."""
