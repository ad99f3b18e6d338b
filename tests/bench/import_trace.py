"""What a process imports, what that costs, and what it calls afterwards; copied as its ``sitecustomize``.

It imports nothing that the process would not have: what that costs would not be seen. On SIGUSR2 the process
writes what it has noted, by ``marshal``, beside the copy, to a file named by its pid.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import importlib._bootstrap as bootstrap  # type: ignore[import-not-found]
import marshal
import os
import sys
import time
from types import FrameType

costs: dict[str, tuple[float, float, str]] = {}
"""By module: the milliseconds of CPU time and the MiB of resident memory of its import, without those that it
imports; and the module that has imported it first, empty for a function."""

called: set[str] = set()
"""The modules of which a function was called while nothing was being imported."""

_open: dict[int, list[tuple[str, list[float]]]] = {}
"""By thread: the imports that have begun, and what was spent below each."""

_load = bootstrap._find_and_load_unlocked


def _measured(name: str, import_: object) -> object:
    within = _open.setdefault(_thread.get_ident(), [])
    below = [0.0, 0.0]
    within.append((name, below))
    sys.setprofile(None)
    begun = _spent()
    try:
        return _load(name, import_)
    finally:
        whole = [after - before for before, after in zip(begun, _spent(), strict=True)]
        within.pop()
        importer, beside = within[-1] if within else ("", [0.0, 0.0])
        beside[:] = beside[0] + whole[0], beside[1] + whole[1]
        costs[name] = whole[0] - below[0], whole[1] - below[1], importer
        if not within:
            sys.setprofile(_note)
        if name == "threading":
            sys.modules[name].setprofile(_note)


def _spent() -> tuple[float, float]:
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[1])
    return 1000 * time.thread_time(), pages * 4096 / 2**20


def _note(frame: FrameType, event: str, function: object) -> None:
    if event == "call":
        called.add(frame.f_globals.get("__name__", ""))
    elif event == "c_call":
        owner = getattr(function, "__self__", None)
        called.add(getattr(function, "__module__", None) or getattr(type(owner), "__module__", ""))


def _write(*_: object) -> None:
    sys.setprofile(None)
    path = os.path.join(os.path.dirname(__file__), str(os.getpid()))
    with open(f"{path}.part", "wb") as file:
        marshal.dump((costs, called), file)
    os.rename(f"{path}.part", path)
    sys.setprofile(_note)


if __name__ == "sitecustomize":
    bootstrap._find_and_load_unlocked = _measured
    os.register_at_fork(after_in_child=called.clear)
    _signal.signal(_signal.SIGUSR2, _write)
    sys.setprofile(_note)
