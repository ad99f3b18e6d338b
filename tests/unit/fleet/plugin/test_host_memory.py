"""The host's memory: read seldom, and saved KV entries removed from it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dynaplan.engines.llamacpp.saved_slots import SavedSlot, saved_in
from dynaplan.fleet.plugin.host_memory import HOST_POLL_S, HostMemoryPoll
from dynaplan.models.shared_memory import HostMemory

GIB = 2**30


class Host:
    """A host with 10 GiB available, on which each worker holds as much."""

    def __init__(self) -> None:
        self.held_bytes = 1 * GIB

    def read(self, pids: Collection[int]) -> HostMemory:
        return HostMemory(16 * GIB, 10 * GIB, dict.fromkeys(pids, self.held_bytes))


def test_it_is_read_again_after_a_while_and_for_other_workers() -> None:
    host = Host()
    poll = HostMemoryPoll(host.read)
    assert poll.read([7], 0.0).resident_bytes == {7: 1 * GIB}
    host.held_bytes = 2 * GIB
    assert poll.read([7], HOST_POLL_S / 2).resident_bytes == {7: 1 * GIB}
    assert poll.read([7, 8], HOST_POLL_S / 2).resident_bytes == {7: 2 * GIB, 8: 2 * GIB}
    host.held_bytes = 3 * GIB
    assert poll.read([7, 8], 2 * HOST_POLL_S).resident_bytes == {7: 3 * GIB, 8: 3 * GIB}


def test_a_worker_that_has_become_ready_is_not_shown_with_the_memory_of_its_load() -> None:
    host = Host()
    poll = HostMemoryPoll(host.read)
    poll.read([7], 0.0)
    host.held_bytes = 5 * GIB
    assert poll.held_bytes(7) == 5 * GIB
    assert poll.read([7], 0.1).resident_bytes == {7: 5 * GIB}


def test_for_a_load_the_oldest_saved_entries_go_and_its_own_last(tmp_path: Path) -> None:
    for age, model in enumerate(("own", "old", "new")):
        (tmp_path / SavedSlot(age, "0" * 16, 100, GIB, model).file_name).touch()
    poll = HostMemoryPoll(Host().read, tmp_path)
    assert poll.read([7], 0.0).saved_bytes == 3 * GIB
    assert poll.make_room("own", 10 * GIB) == 0, "so much is available"
    assert poll.make_room("own", 11 * GIB) == 1 * GIB
    assert [each.model for each in saved_in(tmp_path)] == ["new", "own"]
    assert poll.make_room("own", 13 * GIB) == 2 * GIB
    assert saved_in(tmp_path) == []
