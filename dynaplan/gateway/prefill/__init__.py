"""Remote prefill: a prompt is computed by a prefill worker and decoded by another worker.

The way of one remote prefill, with module names in ``gateway/prefill`` unless a folder is named:

1. ``remote_prefill`` (in the frontend's process) asks ``routing/disaggregation.py`` for the place of
   the prefill. Remote is chosen for a long prompt that the decode worker has not cached, while a prefill
   worker is registered and the queue is short; ``prefill_queue`` reads its length in the background.
2. ``remote_prefill`` puts a ``RemotePrefillRequest`` (``events/prefill_requests.py``) on the NATS JetStream
   queue ``{namespace}_prefill_queue`` (each of several models has its own), with the subject that the answer
   goes to, and waits ``prefill-wait`` seconds. Where engines report their caches, ``prefill_queue`` chooses
   the own queue of the prefill worker that has most of the prompt; prompts of a worker that leaves are put
   back on the shared queue.
3. ``PrefillPuller`` (in a prefill worker's process) pulls it and has its engine compute the KV entries.
   Meanwhile it reports the work as in progress: a message without that is delivered to another worker.
4. The puller publishes a ``PrefillAnswer`` with the hand-off: fields, opaque to dynaplan, by which another
   engine of the same kind finds the KV entries. Only then it acknowledges the message.
5. ``remote_prefill`` receives the answer, and remembers which prefill worker holds the entries.
6. ``gateway/request_path.py`` adds the fields to the client's body and posts it to the decode
   worker, whose engine fetches the KV entries and streams.
7. With the first token ``remote_prefill`` publishes the request's id to the prefill worker, which frees the
   entries.

When any of this fails, or takes too long, the decode worker computes the prompt itself. The design and the
reasons for it: docs/decisions/0005 and 0015.
"""
