"""The time that a computed prompt takes from a prefill worker to a decode worker, as simulations count it.

Source: Dynamo's mocker, which moves 128 KiB of KV entries per token (Llama-3.1-8B in 16 bit) over 64 GB/s.
"""

from __future__ import annotations

HAND_OFF_BASE_S = 0.001
"""The fixed time of a hand-off, in seconds: finding each other."""

HAND_OFF_S_PER_TOKEN = 128 * 1024 / 64e9
"""The time that the KV entries of one token take, in seconds."""


def hand_off_s(prompt_tokens: int) -> float:
    """Return the seconds that the hand-off of a prompt of that length takes."""
    return HAND_OFF_BASE_S + prompt_tokens * HAND_OFF_S_PER_TOKEN
