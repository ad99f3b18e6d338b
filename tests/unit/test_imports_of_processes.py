"""What the processes of a deployment do not import before its first answer, which would wait for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND = """
import sys
sys.argv[1:] = {!r}.split()
from dynaplan.__main__ import main
try:
    main()
except SystemExit:
    pass
"""

PROGRAMS = {
    "help": COMMAND.format("--help"),
    "serve": COMMAND.format("serve graphs.agg:Frontend -f agg.yaml --dry-run"),
    "fleet plugin": "import circus.plugins, dynaplan.fleet_plugin",
    "forked": "from importlib import import_module\n"
    "from dynaplan.fleet.preloading import FIRST\n"
    "for name in FIRST: import_module(name)",
}
SHOW = "\nimport json, sys; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"

NOT_IMPORTED = {
    "help": "asyncio circus email msgspec psutil ssl tornado yaml zmq",
    "serve": "importlib.metadata nats prometheus_client uvloop zoneinfo dynaplan.fleet_plugin "
    "dynaplan.fleet.plugin.plugin dynaplan.gateway dynaplan.models.files.imported_model "
    "dynaplan.models.files.llama_swap dynaplan.models.model dynaplan.planner.inputs dynaplan.simulation "
    "dynaplan.webui dynaplan.worker",
    "fleet plugin": "importlib.metadata nats pynvml uvloop zoneinfo dynaplan.cli dynaplan.gateway "
    "dynaplan.simulation dynaplan.worker",
    "forked": "circus click importlib.metadata nats psutil sqlite3 tornado yaml zmq dynaplan.cli "
    "dynaplan.fleet.plugin.plugin dynaplan.simulation",
}
"""By process: what others need, or this one later."""

HEAVY = ("aiohttp", "google", "grpc", "numpy", "pandas", "scipy", "tensorboard", "xml")
"""What no process needs to answer."""


@pytest.mark.parametrize("process", PROGRAMS)
def test_a_process_imports_nothing_that_its_first_answer_does_not_need(process: str) -> None:
    words = [sys.executable, "-c", PROGRAMS[process] + SHOW]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    imported = json.loads(done.stderr.splitlines()[-1])
    unwanted = tuple(f"{name}." for name in (*HEAVY, *NOT_IMPORTED[process].split()))
    assert [name for name in imported if f"{name}.".startswith(unwanted)] == []
