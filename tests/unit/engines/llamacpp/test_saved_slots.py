"""Which slots and files are kept when a model is put away, and which of them its next load takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.engines.llamacpp.launch_line import fingerprint, read_options
from dynaplan.engines.llamacpp.saved_slots import (
    SavedSlot,
    SavedSlots,
    UsedSlot,
    candidates,
    choose,
    room_bytes,
    saved_in,
)

FINGERPRINT = "0123456789abcdef"


def saved(at_ns: int, size_bytes: int, model: str = "m") -> SavedSlot:
    return SavedSlot(at_ns, FINGERPRINT, 100, size_bytes, model)


def test_the_slot_that_was_used_last_comes_first_and_what_was_only_restored_last() -> None:
    used = {0: (3, 500), 1: (9, 200), 2: (7, 300)}
    assert candidates(used, {3: 400, 1: 150}) == [(1, 200), (2, 300), (0, 500), (3, 400)]


def test_the_newest_that_fit_are_kept_and_older_files_go() -> None:
    old, older = saved(2, 400), saved(1, 400)
    slots = [UsedSlot(1, 200), UsedSlot(0, 300)]
    assert choose(slots, [older, old], 1.0, 1000) == ((UsedSlot(1, 200), UsedSlot(0, 300)), (older,))


def test_what_is_too_large_is_passed_over_for_something_older_that_fits() -> None:
    large, small = UsedSlot(0, 2000), UsedSlot(1, 100)
    assert choose([large, small], [saved(2, 950), saved(1, 100)], 1.0, 1000) == ((small,), (saved(2, 950),))


def test_a_short_prompt_is_not_saved() -> None:
    assert choose([UsedSlot(0, 63), UsedSlot(1, 64)], [], 1.0, 1000).slots == (UsedSlot(1, 64),)


@pytest.mark.parametrize(
    ("limit", "free", "taken", "room"),
    [(100, 1000, 0, 100), (100, 60, 0, 30), (100, 60, 100, 80), (0, 9, 0, 0)],
)
def test_saved_entries_leave_half_of_what_is_free(limit: int, free: int, taken: int, room: int) -> None:
    assert room_bytes(limit, free, taken) == room


@pytest.mark.parametrize("model", ["qwen2.5", "org/model:7b", "a b%.kv", "模型"])
def test_a_file_name_states_what_is_in_it(model: str) -> None:
    slot = saved(12, 34, model)
    assert "/" not in slot.file_name
    assert SavedSlot.parse(slot.file_name) == slot


@pytest.mark.parametrize("name", ["ns_Worker.1a2b.1.kv", "saved.1.x.1.1.m", "saved.", ""])
def test_other_files_are_none_of_ours(name: str) -> None:
    assert SavedSlot.parse(name) is None


def slots_in(directory: Path, model: str = "m", fingerprint: str = FINGERPRINT) -> SavedSlots:
    return SavedSlots(directory, model, fingerprint, 10_000)


def keep(slots: SavedSlots, directory: Path, *sizes: int) -> None:
    slots.make_room([], 1.0)
    for number, size in enumerate(sizes):
        (directory / f"own.{number}.kv").write_bytes(b"x" * size)
        assert slots.keep(f"own.{number}.kv", 100, size)


def test_the_next_load_takes_the_newest_under_its_own_names(tmp_path: Path) -> None:
    keep(slots_in(tmp_path), tmp_path, 1, 2, 3)
    claimed = slots_in(tmp_path).claim(["w.1.kv", "w.2.kv"])
    assert {name: each.size_bytes for name, each in claimed.items()} == {"w.1.kv": 1, "w.2.kv": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.1.kv", "w.2.kv"]


def test_a_saved_file_is_of_its_user_alone(tmp_path: Path) -> None:
    keep(slots_in(tmp_path), tmp_path, 5)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_another_file_or_context_computed_is_removed_and_not_taken(tmp_path: Path) -> None:
    keep(slots_in(tmp_path), tmp_path, 5)
    keep(slots_in(tmp_path, model="other"), tmp_path, 7)
    assert slots_in(tmp_path, fingerprint="f" * 16).claim(["w.1.kv"]) == {}
    assert [each.model for each in saved_in(tmp_path)] == ["other"]


def test_a_file_that_was_cut_or_replaced_is_not_taken(tmp_path: Path) -> None:
    keep(slots_in(tmp_path), tmp_path, 5, 6)
    cut, linked = (tmp_path / each.file_name for each in saved_in(tmp_path))
    cut.write_bytes(b"x")
    linked.unlink()
    linked.symlink_to("/etc/hostname")
    assert slots_in(tmp_path).claim(["w.1.kv", "w.2.kv"]) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_whole_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "own.kv").write_bytes(b"xx")
    assert not slots_in(tmp_path).keep("own.kv", 100, 3)
    assert saved_in(tmp_path) == []


def test_files_beyond_the_room_go_the_oldest_first(tmp_path: Path) -> None:
    keep(slots_in(tmp_path), tmp_path, 6_000, 3_000, 2_000)
    slots_in(tmp_path).trim()
    assert [each.size_bytes for each in saved_in(tmp_path)] == [6_000, 3_000]


def fingerprint_with(model: Path, **options: object) -> str:
    section = {"model": str(model), **{key.replace("_", "-"): value for key, value in options.items()}}
    return fingerprint(read_options(section, 0), 0)


def test_a_fingerprint_differs_by_what_kv_entries_depend_on_and_not_by_speed(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"one")
    same = {fingerprint_with(model, llama_server="/x/llama-server", threads=n) for n in (1, 2)}
    assert len(same) == 1
    others = {
        fingerprint_with(model, llama_server="/x/llama-server", **each)
        for each in ({"ctx_size": 512}, {"cache_type_k": "q8_0"}, {"parallel": 2}, {"served_model_name": "n"})
    }
    model.write_bytes(b"another")
    assert len(same | others | {fingerprint_with(model, llama_server="/x/llama-server", threads=1)}) == 6
    assert fingerprint_with(tmp_path / "none.gguf", llama_server="/x/llama-server") == ""
