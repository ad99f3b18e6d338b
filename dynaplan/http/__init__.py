"""HTTP/1.1, both ways: the server and the client of every process of a deployment.

| module | what it has |
|---|---|
| ``server`` | a connection of a client, from its bytes to the ``Handler`` and back, on httptools |
| ``messages`` | requests and responses as handlers see them |
| ``acceptor`` | new connections, one at a time, and their TLS handshakes |
| ``limits`` | slow clients, and too many |
| ``connections`` | connections to servers, pooled; whole answers and streams |
| ``stream_batching`` | several streams, written together |
| ``routes``, ``trace``, ``request_ids`` | paths and headers that several processes agree on |
| ``browser_policy`` | which requests of web browsers are answered |
| ``tls`` | certificates, of servers and of those that they are shown to |
"""
