"""The tables of ``sizing: formula`` need a library, and say so where it is missing.

What a user is told who wants policy sla and has no profile.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynaplan.planner.sla_model import fit_tables, open_profile
from dynaplan.util.errors import ConfigError

H200 = "h200_sxm-Llama-3.1-8B-Instruct-FP8"


def test_without_scipy_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match="'formula', but the Python module scipy is not") as raised:
        fit_tables(open_profile(H200), H200)
    assert raised.value.hint == "Run: pip install scipy. Or choose sizing: queueing, which needs no library."


def test_sizing_by_queueing_does_not_load_scipy() -> None:
    program = (
        "import sys; from dynaplan.config.settings.planner import PlannerSettings;"
        "from dynaplan.planner.sla_model import build_sla_model;"
        f"build_sla_model(PlannerSettings(profile_results_dir={H200!r}), {{}}, 'random');"
        "assert 'scipy' not in sys.modules and 'numpy' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_missing_profile_names_the_command_that_measures_one() -> None:
    with pytest.raises(ConfigError) as raised:
        open_profile("profiling_results")
    assert "profile-results-dir is 'profiling_results'" in str(raised.value)
    assert "`dynaplan profile-sla -f FILE`" in str(raised.value)
    assert "h200_sxm-Llama-3.1-8B-Instruct-FP8" in str(raised.value)
