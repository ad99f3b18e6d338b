"""Public traces in the repository are as they were published: figures are compared with others' by them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "fixtures" / "traces"

PUBLISHED = {
    "azure_conv.csv": "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    "mooncake_synthetic.jsonl.gz": "e43beb47ac9d36c2e7b1254e3309dd3c39cebc26c8ef340612070bf0298bacb8",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_trace_is_unchanged(name: str) -> None:
    assert hashlib.sha256((TRACES / name).read_bytes()).hexdigest() == PUBLISHED[name]
