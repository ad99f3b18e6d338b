"""Which file systems a store may lie on."""

from __future__ import annotations

import os

import pytest

from dynaplan.store import file_database as module
from dynaplan.store.file_database import SHARED_FILE_SYSTEMS, file_system_of, open_store_directory
from dynaplan.util.errors import DeploymentError

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
36 22 0:31 / /mnt/with\\040space rw shared:17 master:3 - nfs4 server:/export rw,vers=4.2
40 22 0:40 / /mnt/far rw,nosuid - fuse.sshfs me@host: rw
"""


def test_the_type_is_that_of_the_mount_with_the_device_number() -> None:
    assert file_system_of(MOUNTS, os.makedev(254, 0)) == "ext4"
    assert file_system_of(MOUNTS, os.makedev(0, 31)) == "nfs4"
    assert file_system_of(MOUNTS, os.makedev(0, 40)) == "fuse.sshfs"


def test_an_unknown_device_or_an_unreadable_line_has_no_type() -> None:
    assert file_system_of(MOUNTS, os.makedev(9, 9)) == ""
    assert file_system_of("rubbish\n22 1 254:0 / / rw -\n\n", os.makedev(254, 0)) == ""


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "fuse.sshfs"])
def test_a_network_file_system_is_refused(
    kind: str, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = f"1 1 {os.major(device)}:{os.minor(device)} / / rw - {kind} source rw\n"
    monkeypatch.setattr(module, "_mounts", lambda: mounts)
    with pytest.raises(DeploymentError, match=f"network file system .{kind}."):
        open_store_directory(module.Path(tmp_path) / "kv")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuse.fuse-overlayfs", ""])
def test_a_local_file_system_is_taken(kind: str) -> None:
    assert not SHARED_FILE_SYSTEMS.fullmatch(kind)
