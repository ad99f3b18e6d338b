"""One metric pull of a whole deployment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One metric pull. None is "no data"; ``..._missing`` says why there is none.

    ``at_s`` is monotonic seconds. ``kv_usage`` is the mean over the decode workers that answered, 0 to 1
    and above with waiting requests; ``prefill_queue`` is the depth of the whole queue in prompts. Numbers
    of workers are of the registered ones that are awake; ``..._asleep`` are the registered others.
    """

    at_s: float
    kv_usage: float | None = None
    kv_missing: str = ""
    prefill_queue: float | None = None
    queue_missing: str = ""
    waiting_requests: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    decode_asleep: int = 0
    prefill_asleep: int = 0
