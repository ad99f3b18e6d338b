"""The recorded messages of a real vLLM's KV events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "kv_events"


def recorded(name: str = "agg", topic: bytes | None = None) -> list[list[bytes]]:
    """The frames of each message, of one topic if it is given."""
    lines = gzip.decompress((RECORDINGS / f"{name}.frames.jsonl.gz").read_bytes()).decode().splitlines()
    messages = [[bytes.fromhex(frame) for frame in json.loads(line)] for line in lines]
    return [frames for frames in messages if topic in (None, frames[0])]
