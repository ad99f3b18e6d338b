"""The OpenAI-compatible frontend: from a request's bytes to its answer.

The life of one chat request, station by station (module names are in ``gateway/``):

 1. ``frontend.server`` listens on the public port and gives the request to ``frontend.requests``.
 2. ``frontend.requests`` finds the handler of the path and accepts or refuses the request: the API key and
    the number of waiting requests (``frontend.admission``), the body (``frontend.bodies``, ``openai_api``),
    the model's name and the length of the prompt. From here on ``frontend.metrics`` counts it.
 3. ``frontend.forwarding`` leads it to a worker. It repeats stations 4 to 7 with another worker when one
    refuses, or fails before its first token.
 4. ``routing.worker_router`` chooses a decode worker among the registered ones and books the request there.
 5. ``prefill.remote_prefill`` has the prompt computed by a prefill worker, if that is worthwhile, and returns
    the *hand-off*: the fields by which the decode worker's engine finds the computed KV entries.
 6. ``routing.reservation`` reserves a slot, at workers whose card (their registration's data) asks for it.
 7. ``frontend.upstream`` posts the client's bytes, plus those fields, to the worker's engine.
 8. ``frontend.answering`` waits for the first token (``frontend.stream_events`` cuts the stream into whole
    events and finds an engine's errors), and passes the bytes on to the client from then on.
 9. ``frontend.stream_tokens`` counts tokens in the passing bytes; ``frontend.metrics`` observes TTFT and ITL.
10. Back in ``frontend.requests``: the answer ends, the booking and the place in the waiting room are given
    up, and ``frontend.recording`` writes the request's lengths and times to the trace file, if one is
    configured.

Nothing is sent to the client before station 8 has a first token, and so a worker's death until then costs
time but not the request. After it, a worker's death ends the stream with an error event.
"""
