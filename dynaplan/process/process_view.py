"""The command line and the environment that the kernel shows of this process, in ``/proc``."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence

PR_SET_MM, PR_SET_MM_MAP = 35, 14
"""An option of ``prctl`` and what it sets, from ``linux/prctl.h``. It takes no privilege."""

NOT_CHANGED = 0xFFFFFFFF

_shown: list[mmap.mmap] = []
"""The memory that the kernel shows."""


class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map`` of ``linux/prctl.h``."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
                *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


STAT_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
}
"""The numbers of the fields of ``/proc/self/stat`` that are to stay as they are; proc_pid_stat(5)."""


def show_as(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the kernel show these, as after an exec; OSError where it cannot.

    It cannot without CONFIG_CHECKPOINT_RESTORE, and where something emulates a kernel.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={text}") + b"\0" for name, text in environment.items())
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, len(words) + len(variables)), flags=flags)
    memory.write(words + variables)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    now = _MemoryMap(**{name: int(fields[number - 3]) for name, number in STAT_FIELDS.items()})
    now.brk, now.exe_fd = libc.sbrk(0), NOT_CHANGED
    now.arg_start, now.arg_end = begin, begin + len(words)
    now.env_start, now.env_end = now.arg_end, now.arg_end + len(variables)
    number, size, none = ctypes.c_ulong(PR_SET_MM_MAP), ctypes.c_ulong(ctypes.sizeof(now)), ctypes.c_ulong(0)
    if libc.prctl(PR_SET_MM, number, ctypes.byref(now), size, none) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    _shown[:] = [memory]


def is_shown(argv: Sequence[str]) -> bool:
    """Tell whether the kernel shows that command line."""
    with open("/proc/self/cmdline", "rb") as file:
        return file.read() == b"".join(os.fsencode(word) + b"\0" for word in argv)
