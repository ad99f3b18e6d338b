"""KV-aware routing: a request goes to the worker whose KV cache holds most of its prompt.

``kv_index`` and ``prefix_index`` find the workers that hold a prefix, ``kv_following`` and
``kv_cache_follower`` keep the index in step with the engines' KV events, ``prompt_tokens`` and ``tokens``
turn a prompt into block hashes, ``replica_sync`` shares what several frontends have booked.
"""
