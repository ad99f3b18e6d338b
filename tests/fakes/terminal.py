"""A terminal of 80 columns and 24 lines: what a command shows on it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def shown(command: Sequence[str], environment: Mapping[str, str], directory: Path, columns: int = 80) -> str:
    """All that the command writes to the terminal, colours and all, as lines that end in one newline."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    own = {key: value for key, value in environment.items() if key not in ("COLUMNS", "LINES")}
    with os.fdopen(reader, "rb", 0) as screen:
        process = subprocess.Popen(
            command,
            env={**own, "TERM": environment.get("TERM") or "xterm"},
            cwd=directory,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        text = b""
        try:
            while piece := screen.read(65536):
                text += piece
        except OSError:
            pass  # EIO: the last process with the terminal has ended
        process.wait(10)
    return text.decode().replace("\r\n", "\n")
