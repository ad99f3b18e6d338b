"""Importing a graph's module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaplan.graph.importing import import_graph_module


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package ``shipped`` with a module ``agg``; where it lies."""
    folder = tmp_path / "installed" / "shipped"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "agg.py").write_text("PLACE = 'installed'\n")
    (folder / "both.py").write_text("PLACE = 'installed'\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder.parent)])
    yield folder
    for name in [each for each in sys.modules if each.startswith("shipped")]:
        del sys.modules[name]


@pytest.mark.parametrize("is_package", [True, False])
def test_a_folder_of_ones_own_does_not_hide_the_installed_modules(
    installed: Path, tmp_path: Path, is_package: bool
) -> None:
    own = tmp_path / "work" / "shipped"
    own.mkdir(parents=True)
    if is_package:
        (own / "__init__.py").write_text("")
    (own / "mine.py").write_text("from shipped.agg import PLACE\n" if is_package else "PLACE = 'installed'\n")
    (own / "both.py").write_text("PLACE = 'own'\n")
    places = [import_graph_module(f"shipped.{name}", own.parent).PLACE for name in ("agg", "mine", "both")]
    assert places == ["installed", "installed", "own"]
    locations = importlib.util.find_spec("shipped").submodule_search_locations
    assert str(installed) in locations, "the names of its modules are suggested"
