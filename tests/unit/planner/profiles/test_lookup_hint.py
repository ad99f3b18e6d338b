"""What a user is told who wants policy sla and has no profile."""

from __future__ import annotations

import pytest

from dynaplan.planner.sla_model import open_profile
from dynaplan.util.errors import ConfigError


def test_a_missing_profile_names_the_command_that_measures_one() -> None:
    with pytest.raises(ConfigError) as raised:
        open_profile("profiling_results")
    assert "profile-results-dir is 'profiling_results'" in str(raised.value)
    assert "`dynaplan profile-sla` measures one" in str(raised.value)
    assert "h200_sxm-Llama-3.1-8B-Instruct-FP8" in str(raised.value)
