"""The worth of workers' caches as frontends tell it: the tokens that each has lately served.

One key for each frontend, under its lease: ``v1/{namespace}/cache_worth/{its instance id}``, with a JSON
object of tokens by the worker's instance id, both ids as hex.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from dynaplan.store.instances import InstanceKeys
from dynaplan.util.documents import parse_object, whole_field

CACHE_WORTH = InstanceKeys("cache_worth")
"""The instance is a frontend that routes by prefix; the value is what ``worth_text`` makes."""


def worth_text(tokens: Mapping[int, int]) -> str:
    """Write the served tokens by the worker's instance id."""
    return json.dumps({f"{worker:x}": tokens[worker] for worker in sorted(tokens)}, separators=(",", ":"))


def worth_in(texts: Iterable[str]) -> dict[int, int]:
    """Add the frontends' tokens up by the worker's instance id; what cannot be read is left out."""
    sums: Counter[int] = Counter()
    for text in texts:
        try:
            document = parse_object(text)
            sums.update({int(worker, 16): whole_field(document, worker) for worker in document})
        except ValueError:
            continue
    return dict(sums)
