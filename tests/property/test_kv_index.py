"""After any events, deaths and gaps the index says what a set of blocks per worker says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.routing.kv_index import KvIndex

WORKERS = st.integers(0, 3)
BLOCKS = st.lists(st.integers(0, 30), max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["stored", "removed"]), WORKERS, BLOCKS),
        st.tuples(st.sampled_from(["cleared", "left"]), WORKERS, st.just([])),
        st.tuples(st.just("sweep"), st.integers(1, 5), st.just([])),
    ),
    max_size=40,
)


def overlap(held: set[int], hashes: list[int]) -> int:
    """The number of first blocks that are held, one by one."""
    for depth, block in enumerate(hashes):
        if block not in held:
            return depth
    return len(hashes)


@given(STEPS, st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=4))
def test_the_index_equals_a_set_for_each_worker(
    steps: list[tuple[str, int, list[int]]], prompts: list[list[int]]
) -> None:
    index, model = KvIndex(), dict[int, set[int]]()
    for step, worker, blocks in steps:
        held = model.setdefault(worker, set())
        match step:
            case "stored":
                index.add(worker, blocks)
                held.update(blocks)
            case "removed":
                index.remove(worker, blocks)
                held.difference_update(blocks)
            case "cleared":
                index.clear(worker)
                held.clear()
            case "left":
                index.remove_worker(worker)
                held.clear()
            case "sweep":
                index.sweep(worker)
        for prompt in prompts:
            expected = {worker: overlap(held, prompt) for worker, held in model.items()}
            assert index.overlaps(prompt) == {worker: count for worker, count in expected.items() if count}
    while index.sweep():
        pass
    assert len(index) == len(set().union(*model.values()))
