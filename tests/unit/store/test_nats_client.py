"""NATS' client is imported without what it needs for nothing here."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{first}
import dynaplan.store.nats_client, nats.aio.transport
print("aiohttp" in sys.modules, nats.aio.transport.aiohttp is not None)
import aiohttp
"""


@pytest.mark.parametrize(("first", "printed"), [("", "False False\n"), ("import aiohttp", "True True\n")])
def test_aiohttp_is_not_imported_for_nats_and_can_be_by_others_before_or_after(
    first: str, printed: str
) -> None:
    words = [sys.executable, "-c", PROGRAM.format(first=first)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == printed
