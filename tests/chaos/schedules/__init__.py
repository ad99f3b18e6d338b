"""Whole deployments on virtual time: the product's own classes, from a client's HTTP to the statefile.

Real: the reconciler with its terminations, its link to the store and its statefile; the worker's life with
its registration and drain; the frontend with its router, its migration and its prefill queue; the simulated
engine; aiohttp and the gateway's own protocols on both sides of connections. In memory: the key-value store
and the messenger (the adapters' own twins), circus, the processes and the wires between them.
``python -m tests.chaos.schedules --seed 17`` repeats one schedule and tells its story.
"""
