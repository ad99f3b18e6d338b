"""The README's section about a real model, followed as it is written."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.readme import REAL_MODEL, Shell, commands


def test_the_real_model_of_the_readme_answers(tmp_path: Path, model: Path) -> None:
    pull, serve, curl = (command for command in commands() if REAL_MODEL in command)
    shell = Shell(tmp_path, {"XDG_CACHE_HOME": str(Path(sys.prefix) / "cache")})
    try:
        assert str(model) in shell.run(pull)
        with shell.serving(serve):
            assert "Paris" in shell.run(curl)
    finally:
        shell.close()
