"""nats-py's client, imported without aiohttp, which it takes where it is installed, as it is beside vLLM.

It needs aiohttp for ``ws://`` addresses alone, and aiohttp is half of the import: 0.1 s of CPU before the
first answer, and 8 MiB of the deployment's memory.
"""

from __future__ import annotations

import sys

_HIDDEN_MODULE = "aiohttp"

if _HIDDEN_MODULE in sys.modules:
    from nats import errors
    from nats.aio.client import Client
else:
    sys.modules[_HIDDEN_MODULE] = None  # type: ignore[assignment]  # its import raises ImportError
    try:
        from nats import errors
        from nats.aio.client import Client
    finally:
        del sys.modules[_HIDDEN_MODULE]

__all__ = ["Client", "errors"]
