from __future__ import annotations

import errno
import resource
import subprocess
import sys

from dynaplan.util.descriptors import descriptor_limit, is_exhausted

RAISED = """
import resource
from dynaplan.util.descriptors import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 4096)))
print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], raise_descriptor_limit())
"""


def test_the_soft_limit_is_raised_to_the_hard_one_and_stays_there() -> None:
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 1
    assert int(done.stdout.split()[0]) == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)


def test_the_limit_is_the_one_in_force() -> None:
    assert descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_running_out_is_told_from_other_errors() -> None:
    assert is_exhausted(OSError(errno.EMFILE, "too many open files"))
    assert is_exhausted(OSError(errno.ENFILE, "too many open files in system"))
    assert not is_exhausted(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
    assert not is_exhausted(ValueError())
