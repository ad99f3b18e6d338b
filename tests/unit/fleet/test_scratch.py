"""The directory in memory, what workers leave there, and the start-up times beside the statefiles."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dynaplan.fleet.runtime_dir import remove_files_of, scratch_directory
from dynaplan.fleet.startup_times import FILE_NAME, StartupTimesFile, median_startup_s, startup_key
from dynaplan.graph.config import NAMESPACE
from tests.unit.fleet.rules.graphs import worker


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """In the place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    (tmp_path / "runtime").mkdir()
    return tmp_path / "runtime"


def at(memory: Path) -> dict[str, str]:
    return {"DYNAPLAN_MEMORY_DIR": str(memory)}


def test_it_is_private_and_gone_in_the_end(memory: Path, runtime: Path) -> None:
    with scratch_directory("ns", runtime, at(memory)) as directory:
        assert directory == memory / f"dynaplan-{os.getuid()}" / "ns"
        for each in (directory, directory.parent):
            assert stat.S_IMODE(each.stat().st_mode) == 0o700
        (directory / "file").touch()
    assert list(memory.iterdir()) == []


def test_what_killed_deployments_have_left_is_removed_and_those_of_living_ones_are_not(
    memory: Path, runtime: Path
) -> None:
    root = memory / f"dynaplan-{os.getuid()}"
    root.mkdir(mode=0o700)
    for name in ("ns", "other"):
        (root / name / "folder").mkdir(parents=True)
        (root / name / "folder" / "file").touch()
    with scratch_directory("living", runtime, at(memory)) as living:
        (living / "file").touch()
        with scratch_directory("ns", runtime, at(memory)) as directory:
            assert list(directory.iterdir()) == []
            assert sorted(each.name for each in root.iterdir()) == ["living", "ns"]
        assert (living / "file").exists()


def test_two_living_deployments_of_one_name_have_one_each(memory: Path, runtime: Path) -> None:
    with (
        scratch_directory("ns", runtime, at(memory)) as one,
        scratch_directory("ns", runtime, at(memory)) as other,
    ):
        (one / "file").touch()
        assert one != other
        with scratch_directory("ns", runtime, at(memory)) as third:
            assert third not in (one, other)
        assert (one / "file").exists()


def test_a_link_in_its_place_is_not_followed(memory: Path, runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    root = memory / f"dynaplan-{os.getuid()}"
    root.mkdir(mode=0o700)
    (root / "ns").symlink_to(tmp_path / "elsewhere")
    with scratch_directory("ns", runtime, at(memory)) as directory:
        assert not directory.is_symlink()
    assert (tmp_path / "elsewhere" / "precious").exists()


@pytest.mark.parametrize("how", ["link", "open", "file", "no memory"])
def test_a_place_that_is_not_ours_alone_is_not_used(
    memory: Path, runtime: Path, tmp_path: Path, how: str
) -> None:
    root = memory / f"dynaplan-{os.getuid()}"
    if how == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "theirs")
    elif how == "open":
        root.mkdir()
        root.chmod(0o777)
    elif how == "file":
        root.touch()
    else:
        memory = tmp_path / "nothing"
    with scratch_directory("ns", runtime, at(memory)) as directory:
        assert directory == runtime / "scratch"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(runtime.iterdir()) == []


def test_only_the_workers_own_files_are_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("ns_W.a", "ns_W_1.a", "ns_Wa", "ns_W"):
        (scratch / name).touch()
    (scratch / "ns_W.folder").mkdir()
    (scratch / "ns_W.link").symlink_to(tmp_path / "elsewhere")
    remove_files_of("ns_W", scratch)
    assert {path.name for path in scratch.iterdir()} == {"ns_W_1.a", "ns_Wa", "ns_W"}
    assert (tmp_path / "elsewhere" / "precious").exists()
    remove_files_of("ns_W", tmp_path / "nothing")


# -- start-up times ------------------------------------------------------------------------------------


def test_the_usual_time_is_the_median_of_the_last_five(tmp_path: Path) -> None:
    times = StartupTimesFile(tmp_path)
    assert median_startup_s(times.read(), "a") is None
    for seconds in (1000, 40, 41, 42, 300, 39):
        times.learn("a", seconds)
    times.learn("b", 7)
    assert median_startup_s(StartupTimesFile(tmp_path).read(), "a") == 41
    assert median_startup_s(times.read(), "b") == 7
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": ["x"]}', "\x00"])
def test_a_spoilt_file_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    times = StartupTimesFile(tmp_path)
    assert times.read() == {}
    times.learn("a", 3)
    assert median_startup_s(times.read(), "a") == 3


def test_what_cannot_be_written_is_forgotten(tmp_path: Path) -> None:
    StartupTimesFile(tmp_path / "nothing").learn("a", 3)
    assert list(tmp_path.iterdir()) == []


def test_the_file_can_be_no_namespaces_statefile() -> None:
    assert not NAMESPACE.fullmatch(FILE_NAME.removesuffix(".json"))


def test_a_start_is_compared_with_those_of_the_same_engine_model_and_gpus() -> None:
    one, two = worker("VllmWorker", gpus=(0,)), worker("VllmWorker_1", gpus=(1, 2))
    settings = {"engine": "vllm", "model": "/models/m"}
    keys = {
        startup_key(one, settings),
        startup_key(two, settings),
        startup_key(one, {**settings, "engine": "sglang"}),
        startup_key(one, {**settings, "model": "/models/n"}),
    }
    assert len(keys) == 4
    assert startup_key(worker("VllmWorker_7", gpus=(3,)), settings) == startup_key(one, settings)
    assert startup_key(one, {}) is None
