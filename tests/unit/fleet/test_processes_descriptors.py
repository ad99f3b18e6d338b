"""A process that may open no file more does not take others for gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dynaplan.process.process_table import identify


def test_without_a_descriptor_it_is_not_known_whether_a_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_more(path: Path, **options: Any) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", none_more)
        with pytest.raises(OSError, match="Too many open files"):
            identify(os.getpid())
    assert identify(os.getpid())
    assert identify(1 << 30) is None
