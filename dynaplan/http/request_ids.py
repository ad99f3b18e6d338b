"""The name of a request, which every response bears: the client's own where it is usable."""

from __future__ import annotations

import re
from random import Random

USABLE_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}", re.ASCII)
"""The form of an id that is sent back: nothing that could break a header or a line of a log."""

_RANDOM = Random()  # a tenth of the cost of a UUID, for a name that is no secret


def new_request_id() -> str:
    """Return an id of 128 random bits, as 32 hexadecimal digits."""
    return f"{_RANDOM.getrandbits(128):032x}"


def attempt_id(name: str) -> str:
    """Return an id for one attempt at the request of that name: its name, and eight hexadecimal digits.

    Engines refuse an id that they are still working on, and a client may use one twice, or a request be
    tried at two workers.
    """
    return f"{name}-{_RANDOM.getrandbits(32):08x}"


def request_id(given: str | None) -> str:
    """Return the client's id, or a new one when it gave none or one that is not usable."""
    return given if given and USABLE_ID.fullmatch(given) else new_request_id()
