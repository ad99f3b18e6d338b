"""What the simulated engine refuses is refused before anything starts."""

from __future__ import annotations

import pytest

from dynaplan.engines.sim.checking import check
from dynaplan.util.errors import ConfigError


def test_the_check_raises_what_making_the_engine_would() -> None:
    check({"speedup-ratio": 2}, 1)
    with pytest.raises(ConfigError, match="speedup-ratio"):
        check({"speedup-ratio": -1}, 1)
    with pytest.raises(ConfigError):
        check({"profile": "no-such-profile"}, 1)
