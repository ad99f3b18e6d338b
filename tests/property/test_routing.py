"""One worker that holds everything popular is not flooded: the bound on what the KV router makes uneven."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.routing.routing_logic import Candidate, KvAware

BLOCKS = st.integers(0, 10_000)


@given(
    st.lists(st.tuples(BLOCKS, BLOCKS, BLOCKS), min_size=1, max_size=16),
    BLOCKS,
    st.sampled_from([0.0, 0.5, 1.0, 4.0, 16.0]),
    st.integers(0, 100),
)
def test_a_chosen_workers_load_exceeds_the_least_by_no_more_than_the_weighted_overlap(
    loads: list[tuple[int, int, int]], prompt_blocks: int, weight: float, turn: int
) -> None:
    candidates = [
        Candidate(number, 0, active, prefill, min(overlap, prompt_blocks))
        for number, (active, prefill, overlap) in enumerate(loads)
    ]
    chosen = KvAware(lambda: 0.0, weight, turn=turn).choose(candidates, prompt_blocks)
    load = {each: weight * each.prefill_blocks + each.active_blocks for each in candidates}
    assert load[chosen] <= min(load.values()) + weight * chosen.overlap_blocks
