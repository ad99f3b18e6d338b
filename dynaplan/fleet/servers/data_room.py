"""Room for the data of embedded servers: in the runtime directory, or in memory where that disk is full.

etcd takes 62 MB on the disk of the statefiles when it starts, and ends when it cannot write there. Its
data is worth no more than its process, so it may as well lie in memory; it does not by default, because the
memory of containers is often just 64 MB, and because the last logout of a user may clear it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from dynaplan.fleet.runtime_dir import make_private_directory
from dynaplan.fleet.servers.embedded import ServerSpec

ROOM_BYTES = 128 * 2**20
"""Room that a server's data needs: twice etcd's first 62 MB, since it makes the next log file beforehand."""


def moved_into_memory(server: ServerSpec, scratch_dir: Path) -> str:
    """Move the place of the server's data into ``scratch_dir`` when its own disk is full and that is not.

    What was there is removed: the server starts with new data. Return a line for the user; empty when nothing
    was moved. The server must not run.
    """
    data = server.working_dir / server.data
    free_bytes = _free_bytes(server.working_dir)
    if data.is_symlink() or free_bytes >= ROOM_BYTES or not has_room(scratch_dir):
        return ""
    place = scratch_dir / f"{server.name}.{server.data}"
    shutil.rmtree(data, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    make_private_directory(place)
    os.symlink(place, data)
    return (
        f"The disk of {server.working_dir} has {free_bytes / 2**20:.0f} MB left, and {server.name} needs "
        f"{ROOM_BYTES // 2**20}: its data lies in memory, in {place}."
    )


def all_moved_into_memory(servers: Iterable[ServerSpec], scratch_dir: Path) -> list[str]:
    """Do that for each server that has data; return the lines for the user."""
    lines = (moved_into_memory(each, scratch_dir) for each in servers if each.data)
    return [line for line in lines if line]


def has_room(directory: Path, room_bytes: int = ROOM_BYTES) -> bool:
    """Tell whether the directory's disk has that many bytes left."""
    return _free_bytes(directory) >= room_bytes


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free
