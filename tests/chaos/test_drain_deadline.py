"""A drain that reaches its deadline: what is left goes on at another worker, on virtual time."""

from __future__ import annotations

from dynaplan.worker.worker_runtime import EXIT_CUT
from tests.chaos.history import Request, expected
from tests.chaos.schedules.programs import LEAVE_S, MODEL
from tests.chaos.schedules.schedule import Schedule, run_schedule

TOKENS = 120
"""Tokens of an answer that takes longer than a worker has to leave."""

STREAMS = 4


class Deadline(Schedule):
    """Streams at both decode workers, of which one is told to leave."""

    async def harm(self) -> None:
        clients, loop = self.clients, self.machine.loop
        streams: list[Request] = []
        path = "/v1/chat/completions"
        for number in range(STREAMS):
            messages = [{"role": "user", "content": f"Story {number}"}]
            body = {"model": MODEL, "stream": True, "max_tokens": TOKENS, "messages": messages}
            body["stream_options"] = {"include_usage": True}
            request = Request(number, body, path, loop.time(), expected(body, path))
            streams.append(request)
            clients.process.context.run(loop.create_task, clients.send(request))
        assert await self.becomes(lambda: all(each.text for each in streams), 20.0)
        await self.scale_to(1, 1)
        assert await self.becomes(lambda: all(each.ended_s for each in streams), 120.0)
        cut = [name for name, code in self.machine.codes if code == EXIT_CUT]
        self.machine.tell(f"{len(cut)} cut")
        self.machine.wrong += [str(each) for each in streams if not each.is_whole]
        self.machine.wrong += [] if cut else [f"no drain reached its deadline of {LEAVE_S} s"]


def test_a_drain_that_reaches_its_deadline_cuts_no_stream() -> None:
    outcome = run_schedule(1, Deadline)
    assert outcome.wrong == []
    assert outcome.requests >= STREAMS
