"""Nothing that the fork server imports leaves a trace that forked processes would share."""

from __future__ import annotations

import json
import subprocess
import sys

LOOKS = """
import json, os, random, sys
before = sorted(os.listdir("/proc/self/fd"))
seed = random.getstate()
from importlib import import_module
from dynaplan.fleet.preloading import FIRST, THEN, WITH
names = [*FIRST, *THEN, *(name for each in WITH.values() for name in each)]
for name in names:
    import_module(name)
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")),
    "opens": sorted(os.listdir("/proc/self/fd")) != before,
    "draws": random.getstate() != seed,
    "imports": sorted({"numpy", "dynaplan.worker.main", "dynaplan.fleet.joining"} & {*sys.modules}),
    "twice": len({*names}) != len(names),
}))
"""


def test_what_is_imported_once_starts_no_thread_opens_no_file_and_draws_no_random_number() -> None:
    words = [sys.executable, "-c", LOOKS]
    looked = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert looked == {"threads": 1, "opens": False, "draws": False, "imports": [], "twice": False}
