"""Whatever happens to the engine model: blocks are conserved, and every request ends exactly once."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynaplan.engines.timing_model.engine_model import (
    EngineModel,
    EngineRequest,
    EngineSettings,
    RequestState,
)
from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.engines.timing_model.step_timing import StepTiming

BLOCK_TOKENS = 4


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps, cancels and releases in any order on a small, crowded engine."""

    @initialize(
        blocks=st.integers(8, 30),
        slots=st.integers(1, 6),
        budget=st.integers(6, 40),
        is_caching=st.booleans(),
    )
    def start(self, blocks: int, slots: int, budget: int, is_caching: bool) -> None:
        self.settings = EngineSettings(
            total_blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            context_tokens=blocks * BLOCK_TOKENS,
            batched_tokens=budget,
            request_slots=slots,
            is_prefix_caching=is_caching,
            jitter=0.1,
        )
        timing = StepTiming(lambda tokens: 5.0 + tokens, lambda decodes, kv: 2.0 + decodes + kv / 100)
        self.published: set[int] = set()
        self.model = EngineModel(self.settings, timing, self)
        self.requests: list[EngineRequest] = []
        self.cancelled: set[str] = set()
        self.ended: list[str] = []

    def stored(self, block: int) -> None:
        assert block not in self.published
        self.published.add(block)

    def removed(self, block: int) -> None:
        self.published.remove(block)

    @rule(
        prompt=st.integers(1, 60),
        answer=st.integers(1, 40),
        family=st.integers(0, 2),
        is_remote=st.booleans(),
        is_held=st.booleans(),
    )
    def submit(self, prompt: int, answer: int, family: int, is_remote: bool, is_held: bool) -> None:
        prompt = min(prompt, self.settings.context_tokens - 1)
        answer = min(answer, self.settings.context_tokens - prompt)
        hashes = block_hashes([family] * prompt, BLOCK_TOKENS)
        name = str(len(self.requests))
        request = EngineRequest(name, prompt, answer, hashes, is_remote=is_remote, is_held=is_held)
        self.model.submit(request)
        self.requests.append(request)

    @rule(horizon_s=st.sampled_from([0.0, 0.05, math.inf]), times=st.integers(1, 20))
    def step(self, horizon_s: float, times: int) -> None:
        for _ in range(times):
            before = {request.request_id: self.model.emitted_tokens(request) for request in self.requests}
            generated = self.model.totals.generated_tokens
            duration_s = self.model.step(horizon_s)
            if duration_s is not None:
                self.check(duration_s, self.model.totals.generated_tokens - generated, before)

    def check(self, duration_s: float, tokens: int, before: dict[str, int]) -> None:
        gained = [
            self.model.emitted_tokens(request) - before[request.request_id] for request in self.requests
        ]
        assert all(count >= 0 for count in gained)
        assert sum(gained) == tokens
        assert duration_s >= 0.0
        assert bool(tokens) <= (duration_s > 0.0)
        self.note_finished()

    def note_finished(self) -> None:
        self.ended += [request.request_id for request in self.model.finished]

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            was_here = request.state is not RequestState.ENDED
            was_held = request.state is RequestState.HELD
            assert self.model.cancel(request.request_id) == was_here
            if was_here and not was_held:
                self.cancelled.add(request.request_id)

    @rule()
    def release_all(self) -> None:
        for request in self.requests:
            assert self.model.release(request.request_id) == (request.state is RequestState.HELD) or (
                request.state is RequestState.ENDED
            )

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "model"):
            return
        blocks = self.model.blocks
        assert 0 <= blocks.used <= blocks.total
        assert blocks.used + blocks.free == blocks.total
        assert len(blocks._idle) <= blocks.free
        holders = [r for r in self.requests if r.state not in (RequestState.WAITING, RequestState.ENDED)]
        shared = {block for request in holders for block in request._shared}
        private = 0
        for request in holders:
            context = request._context
            if request.state is RequestState.DECODING:
                context += self.model._clock - request._joined_at
            tokens = max(context, request._target - request.is_remote)
            private += self.settings.blocks_for(tokens) - len(request._shared)
        assert blocks.used == len(shared) + private

    @invariant()
    def a_listener_knows_the_published_blocks(self) -> None:
        if not hasattr(self, "model"):
            return
        assert self.published == self.model.blocks._users.keys()

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        if not hasattr(self, "model"):
            return
        load = self.model.load()
        states = [request.state for request in self.requests]
        assert load.waiting_requests == states.count(RequestState.WAITING)
        assert load.running_requests == states.count(RequestState.PREFILLING) + states.count(
            RequestState.DECODING
        )
        assert load.running_requests <= self.settings.request_slots
        assert len(self.model._held) == states.count(RequestState.HELD)
        assert 0.0 <= load.kv_usage <= 1.0

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for _ in range(20_000):
            for request in self.requests:
                self.model.release(request.request_id)
            if self.model.is_idle:
                break
            assert self.model.step() is not None
            self.note_finished()
        for request in self.requests:
            self.model.release(request.request_id)
        assert self.model.is_idle
        assert self.model.blocks.used == 0
        expected = sorted(r.request_id for r in self.requests if r.request_id not in self.cancelled)
        assert sorted(self.ended) == expected
        for request in self.requests:
            if request.request_id not in self.cancelled:
                assert self.model.emitted_tokens(request) == request.max_tokens


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestEngineModel = EngineMachine.TestCase
