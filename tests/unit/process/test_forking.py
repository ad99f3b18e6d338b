"""Only what would be the same as after an exec is forked."""

from __future__ import annotations

import pytest

from dynaplan.process.forking import may_fork

OWN = {"LANG": "C", "DYN_OLD": "1"}
WORDS = ["python", "-m", "worker"]


@pytest.mark.parametrize(
    ("argv", "environment", "is_forked"),
    [
        ([*WORDS, "--name", "a"], OWN, True),
        (WORDS, {"LANG": "C", "DYN_NEW": "2"}, True),
        (WORDS[:2], OWN, False),
        (["python3", "-m", "worker"], OWN, False),
        (["python", "-X", "dev", "-m", "worker"], OWN, False),
        (WORDS, {**OWN, "LANG": "de_DE"}, False),
        (WORDS, {"DYN_OLD": "1"}, False),
        (WORDS, {**OWN, "LD_PRELOAD": ""}, False),
    ],
)
def test_the_command_and_the_environment_decide(
    argv: list[str], environment: dict[str, str], is_forked: bool
) -> None:
    assert may_fork(([], OWN, [["other"], WORDS], ["DYN"]), argv, environment) is is_forked
