"""HTTP/1.1, both ways: the server and the client of every process of a deployment.

| module | what it has |
|---|---|
| ``server`` | a connection of a client, from its bytes to the ``Handler`` and back, on httptools |
| ``messages`` | requests and responses as handlers see them |
| ``acceptor`` | new connections, and their TLS handshakes |
| ``limits`` | slow clients, and too many |
| ``connections`` | connections to servers, pooled; whole answers and streams |
| ``client`` | requests to other processes: ``get``, and ``HttpClient`` for more than one |
| ``stream_batching`` | several streams, written together |
| ``routes``, ``route_table`` | routes, and how they are found |
| ``trace``, ``request_ids`` | headers that go on from one server to the next |
| ``browser_policy`` | which requests of web browsers are answered |
| ``tls`` | certificates, of servers and of those that they are shown to |
"""
