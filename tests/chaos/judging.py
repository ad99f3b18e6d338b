"""What must hold of every answer, whatever was done to the deployment: the checker of histories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.chaos.history import Request

FRONTEND, DECODE, PREFILL = "Frontend", "VllmWorker", "PrefillWorker"
MOST_DEATHS = 3
DEATHS_TO_REFUSE = 2
MIGRATIONS = 3


@dataclass
class Judge:
    """Tells whether each request has ended once: whole, with its text, or with an error that is true.

    ``harms`` are the moments at which a process of a service died, or had a connection cut;
    ``without_decode`` the ones at which no decode worker could answer. ``slack_s`` is how far both may lie
    from what a client sees of them.
    """

    slack_s: float = 0.5
    harms: list[tuple[float, str]] = field(default_factory=list)
    without_decode: list[float] = field(default_factory=list)

    def harmed(self, now_s: float, *names: str) -> None:
        """Note a harm to processes of these names."""
        services = [each for each in (FRONTEND, DECODE, PREFILL) for name in names if each in name]
        self.harms += [(now_s, service) for service in services]

    def judge(self, history: Iterable[Request]) -> Iterator[str]:
        """Yield what is wrong with the answers."""
        for request in history:
            if not request.ended_s:
                yield f"never ended: {request}"
            elif request.is_whole:
                yield from _judge_whole(request)
            elif why := self._unexplained(request):
                yield f"{why}: {request}"

    def _unexplained(self, request: Request) -> str:
        """Return what is not true of an error; empty when it is."""
        if not request.whole.startswith(request.text):
            return f"a cut answer with another text ({request.text!r})"
        if not request.error:
            if not request.broken:
                return "cut without an error"
            return "" if self._losses(request, FRONTEND) else "the frontend broke off unharmed"
        losses = self._losses(request, DECODE)
        if "Workers have died over this request" in request.error:
            # An equal request may have caused the deaths, before this one was sent (poison_requests.py).
            deaths = sum(service == DECODE and at_s <= request.ended_s for at_s, service in self.harms)
            return "" if deaths >= DEATHS_TO_REFUSE else "refused after too few deaths"
        if request.status == 502:
            return "" if losses >= MOST_DEATHS else "an error without enough deaths"
        if "files and connections open" in request.error:
            return "" if self._losses(request, FRONTEND) else "out of descriptors unharmed"
        if request.status not in (200, 503):
            return "an error of another kind"
        is_true = self._was_without_decode(request) or losses > MIGRATIONS
        return "" if is_true else "an error although a worker was there"

    def _losses(self, request: Request, service: str) -> int:
        """Count the harms to that service while the request was under way."""
        slack_s = self.slack_s
        return sum(
            request.sent_s - slack_s <= at_s <= request.ended_s + slack_s and service == name
            for at_s, name in self.harms
        )

    def _was_without_decode(self, request: Request) -> bool:
        slack_s = 2 * self.slack_s
        moments = self.without_decode
        return any(request.sent_s - slack_s <= at_s <= request.ended_s + slack_s for at_s in moments)


def _judge_whole(request: Request) -> Iterator[str]:
    if request.text != request.whole:
        yield f"another text: {request}\n  {request.text!r}\n  {request.whole!r}"
    if request.finish_reason not in ("length", "stop"):
        yield f"no reason for its end: {request}"
    if request.finish_reason == "length" and request.tokens != request.body["max_tokens"]:
        yield f"{request.tokens} tokens counted: {request}"
    if request.is_stream and len(request.ids) != 1:
        yield f"ids {sorted(request.ids)}: {request}"
    if request.is_stream and request.roles != ("chat" in request.path):
        yield f"{request.roles} roles: {request}"
