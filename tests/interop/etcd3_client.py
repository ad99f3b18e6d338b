"""The independent client ``etcd3`` behind a pipe: ``python etcd3_client.py TARGET_HOST TARGET_PORT``.

etcd3 0.12 needs a protobuf older than 4, which cannot be installed beside dynaplan's libraries; so it runs in
a Python of its own. Reads one JSON list per line, ``[name, argument ...]``, and answers each with one line,
``{"result": ...}`` or ``{"error": ...}``. Imports nothing of dynaplan.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

with warnings.catch_warnings():
    # Its generated code uses what protobuf 3.20 has deprecated.
    warnings.simplefilter("ignore")
    import etcd3  # type: ignore[import-not-found]

TIMEOUT_S = 10


class Calls:
    """What can be asked for: the methods' names are the calls'."""

    def __init__(self, host: str, port: str) -> None:
        self._client = etcd3.client(host=host, port=port, timeout=TIMEOUT_S)
        self._events: Iterator[Any] = iter(())

    def get_prefix(self, prefix: str) -> list[dict[str, Any]]:
        """Every key below the prefix."""
        return [
            {"key": metadata.key.decode(), "value": value.decode(), "lease": metadata.lease_id}
            for value, metadata in self._client.get_prefix(prefix)
        ]

    def put_together(self, keys: dict[str, str]) -> bool:
        """Write the keys in one transaction; whether it was carried out."""
        puts = [self._client.transactions.put(key, value) for key, value in keys.items()]
        succeeded, _ = self._client.transaction(compare=[], success=puts, failure=[])
        return bool(succeeded)

    def revoke(self, lease: int) -> None:
        """End a lease, and with it every key below it."""
        self._client.revoke_lease(lease)

    def watch(self, prefix: str) -> None:
        """From now on ``next_event`` tells what happens below the prefix."""
        self._events, _ = self._client.watch_prefix(prefix)

    def next_event(self) -> dict[str, Any]:
        """Wait for the next thing that happens."""
        event = next(self._events)
        return {"key": event.key.decode(), "value": event.value.decode(), "event": type(event).__name__}


def main(host: str, port: str) -> None:
    calls = Calls(host, port)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(calls, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
