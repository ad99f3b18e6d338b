"""The files that a holder removes, and the processes that it spares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dynaplan.process.holder import cleans_up, remove
from tests.fakes.polling import wait_until


def test_files_links_and_directories_go_and_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    kept, inner = tmp_path / "kept", tmp_path / "run" / "deep"
    kept.mkdir()
    (kept / "file").touch()
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (inner / "link").symlink_to(kept)
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "alone").touch()
    remove([str(tmp_path / name) for name in ("run", "link", "alone", "nothing")])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept"]
    assert (kept / "file").exists()


def test_a_directory_with_a_slash_goes_only_if_it_is_empty(tmp_path: Path) -> None:
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    remove([f"{tmp_path}/empty/", f"{tmp_path}/full/"])
    assert [each.name for each in tmp_path.iterdir()] == ["full"]


def test_a_process_that_is_gone_or_another_program_does_not_clean_up() -> None:
    assert not cleans_up(os.getpid())
    assert not cleans_up(2**22 + 1)


def test_a_process_without_a_command_line_is_spared_as_it_may_become_one_that_cleans_up() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])  # like one in the midst of an exec it has none
    try:
        wait_until(lambda: cleans_up(ended.pid))
    finally:
        ended.wait()
