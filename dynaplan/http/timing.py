"""Time limits and intervals of HTTP servers and clients, in seconds."""

from __future__ import annotations

# Servers
ACCEPT_YIELD_S = 0.001
"""Without accepting after connections were left to the other processes on the same socket."""
OTHER_ACCEPTORS_POLL_S = 1.0
"""Between two looks for other processes on the same socket, while connections come."""
ACCEPT_PAUSE_S = 0.5
"""Without accepting after the machine had no resources for another connection."""
NO_ROOM_PAUSE_S = 0.05
"""Without accepting while too many connections are being refused."""
FIRST_REQUEST_S = 5.0
"""For a client to begin its first request, before its connection counts as idle where there are too many."""
LAST_BYTES_S = 0.02
"""For the first bytes of the last connections: the kernel has them already."""
LAST_HANDSHAKES_S = 1.0
"""For the handshakes under way at the end."""
HANDSHAKE_TIMEOUT_S = 10.0
"""For a client to complete the TLS handshake after its connection."""
TLS_CLOSE_TIMEOUT_S = 15.0
"""For a closed connection to send the rest, and its client to confirm that it has all."""
HEAD_TIMEOUT_S = 30.0
"""For a client to send a request's line and headers, once it has begun."""
REFUSAL_LINGER_S = 1.0
"""How long a refused connection stays open, so that its client can read the refusal."""
LINGER_S = 5.0
"""For the rest of a body to be read and dropped, where it was answered before it had come."""
CLOSE_TIMEOUT_S = 0.5
"""For cancelled requests to end, when nearly every one is answered already."""
CLOSE_POLL_S = 0.02
"""Between two checks at the end whether the connections are closed."""

# Clients
CONNECT_TIMEOUT_S = 2.0
"""Time that connecting to a server may take."""
KEEP_ALIVE_S = 4.0
"""Time for which an idle connection is kept.

Engines keep theirs longer (vLLM and SGLang 5 s), so that this side closes first.
"""
