"""KV-aware routing: a request goes to the worker whose KV cache holds most of its prompt.

- ``index``: which workers hold which blocks, reported or predicted.
- ``follower`` keeps the reported index in step with the engines' KV events (``engines/kv_events.py``).
- ``tokenizing`` turns a prompt into block hashes, in a process of its own (``tokenizer_main``, which reads
  ``tokenizer_files`` and renders ``chat_templates``).
- ``replica_sync`` shares bookings among several frontends.
- ``router_inputs`` has all of these for the router.

The choice itself is ``KvAware`` in ``routing/routing_logic``.
"""
