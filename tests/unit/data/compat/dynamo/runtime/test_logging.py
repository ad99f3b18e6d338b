from __future__ import annotations

import os
import subprocess
import sys

from dynaplan.graph.loading import compat_environment

PROGRAM = """
import logging
from dynamo.runtime.logging import configure_dynamo_logging
configure_dynamo_logging(service_name="Backend", worker_id=1)
logging.getLogger("mine").info("said")
"""


def test_a_program_logs_in_dynaplans_format() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=compat_environment(os.environ), capture_output=True, text=True
    )
    assert "INFO mine: said" in run.stderr
