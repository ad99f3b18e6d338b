"""The environment of a helper: Python's own variables, and where this dynaplan lies."""

from pathlib import Path

import dynaplan
from dynaplan.foundation.helper_process import helper_environment


def test_a_helper_gets_pythons_variables_and_no_secret() -> None:
    environ = {"PYTHONHASHSEED": "0", "COVERAGE_PROCESS_START": "x", "DYNAPLAN_API_KEY": "s", "PATH": "/bin"}
    environment = helper_environment(environ)
    home = str(Path(dynaplan.__file__).resolve().parents[1])
    assert environment == {"PYTHONHASHSEED": "0", "COVERAGE_PROCESS_START": "x", "PYTHONPATH": home}


def test_a_path_of_the_parent_comes_first() -> None:
    assert helper_environment({"PYTHONPATH": "/own"})["PYTHONPATH"].startswith("/own:")
