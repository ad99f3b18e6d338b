"""The place of a prefill: the decode worker itself (local) or a prefill worker (remote)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.contract.store_keys import (
    MAX_LOCAL_PREFILL_LENGTH,
    MAX_LOCAL_RUNNING,
    live_setting,
    live_settings_prefix,
)


class PrefillPlace(Enum):
    """The place of a prefill and the reason. Only ``REMOTE`` leaves the decode worker."""

    REMOTE = "remote"
    OFF = "remote prefill is off"
    NO_WORKER = "there is no prefill worker"
    ASLEEP = "every prefill worker sleeps"
    OUT_OF_REACH = "a prefill worker is on another host, and cannot hand KV entries over"
    SHORT = "the prompt is short enough for the decode worker"
    QUEUE_FULL = "the prefill queue is full"
    QUEUE_AWAY = "the prefill queue does not answer"


def place_prefill(
    settings: DisaggregationSettings,
    prompt_tokens: int,
    prefix_hit_rate: float,
    queue_size: int,
    prefill_workers: int,
    can_hand_over: bool = True,
    running: int = 0,
) -> PrefillPlace:
    """Return the place to compute the prompt; the decode worker has ``running`` requests, this one included.

    Remote iff ``int(prompt_tokens * (1 - prefix_hit_rate)) > max_local_prefill_length`` (only asked for
    when conditional) and ``queue_size < max_prefill_queue_size``. Source: the disaggregated router of
    Dynamo 0.2 to 0.3. New here: never remote without a prefill worker, nor, when unconditional, onto a
    full queue; nor unless every prefill worker ``can_hand_over`` to the decode worker, for any of them may
    take the prompt from the queue. Beyond ``max_local_running`` requests a short prompt is remote, too.
    """
    if not settings.is_on:
        return PrefillPlace.OFF
    if not prefill_workers:
        return PrefillPlace.NO_WORKER
    if not can_hand_over:
        return PrefillPlace.OUT_OF_REACH
    to_compute_tokens = int(prompt_tokens * (1 - prefix_hit_rate))
    has_room = settings.max_local_running is None or running <= settings.max_local_running
    if settings.is_conditional and has_room and to_compute_tokens <= settings.max_local_tokens:
        return PrefillPlace.SHORT
    if queue_size >= settings.max_queued:
        return PrefillPlace.QUEUE_FULL
    return PrefillPlace.REMOTE


def with_live_settings(
    settings: DisaggregationSettings, namespace: str, keys: Mapping[str, str]
) -> DisaggregationSettings:
    """Return the settings with those set in the store's keys.

    A missing one, or no whole number, changes nothing.
    """
    prefix = live_settings_prefix(namespace)
    fields = {
        MAX_LOCAL_PREFILL_LENGTH: "max_local_prefill_length_tokens",
        MAX_LOCAL_RUNNING: "max_local_running",
        "max_prefill_queue_size": "max_prefill_queue_size",
    }
    found = {field: live_setting(keys.get(prefix + name, "")) for name, field in fields.items()}
    changed: dict[str, Any] = {field: number for field, number in found.items() if number is not None}
    return replace(settings, **changed)


def route_prefill(
    workers: Iterable[int], overlaps: Mapping[int, int], waiting_blocks: Mapping[int, int]
) -> int | None:
    """Return the prefill worker that a prompt is directed to; None: it goes to whichever asks first.

    ``overlaps`` are by worker the blocks of the prompt that it has cached, ``waiting_blocks`` the ones that
    prompts directed there are yet to compute. A worker is worth the wait while what it has cached is more
    than what waits there beyond the least of all: the one that saves most is taken.
    """
    waiting = {worker: waiting_blocks.get(worker, 0) for worker in workers}
    least = min(waiting.values(), default=0)
    saved = {worker: overlaps.get(worker, 0) - blocks + least for worker, blocks in waiting.items()}
    best = max(saved, key=saved.__getitem__, default=None)
    return best if best is not None and overlaps.get(best, 0) and saved[best] > 0 else None


@dataclass(frozen=True)
class QueueReading:
    """A reading of the prefill queue's depth, and the part of it (``own``) that the reader itself put
    there."""

    depth: int = 0
    own: int = 0

    def estimate(self, own_now: int) -> int:
        """Estimate the queue's depth: what others had in it at the last reading, plus ``own_now``."""
        return max(0, self.depth - self.own) + own_now
