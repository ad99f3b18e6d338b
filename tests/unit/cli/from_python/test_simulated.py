"""``dynaplan.simulate`` does what the command does, also under a running event loop."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import dynaplan
from dynaplan.cli.from_python.simulated import outside_loop
from dynaplan.util.errors import ConfigError

LOAD = "constant:rate=4,duration=30,isl=500,osl=20"


def test_rows_are_those_of_the_command() -> None:
    rows = dynaplan.simulate(
        LOAD, ["static:1", "static:2"], mode="agg", options={"VllmWorker.max-num-seqs": 8}
    )
    assert [row["policy"] for row in rows] == ["static:1", "static:2"]
    assert rows[0]["requests"] == rows[1]["requests"] > 100


async def test_it_works_where_an_event_loop_runs() -> None:
    assert dynaplan.simulate(LOAD, "static:1,1")[0]["policy"] == "static:1,1"
    assert outside_loop(threading.get_ident) != threading.get_ident()


def test_an_option_without_a_service_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Service\.key"):
        dynaplan.simulate(LOAD, options={"ttft": 3})


def test_importing_dynaplan_imports_nothing_of_it() -> None:
    script = "import sys, dynaplan; print([m for m in sys.modules if m.startswith('dynaplan.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dynaplan.nothing  # noqa: B018
