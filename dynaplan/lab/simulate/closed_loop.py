"""A load of clients that each wait for their answer before they ask again, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.simulate.run import Course, Policy, Result
from dynaplan.simulation.service import ServiceSettings

STEP_S = 0.01
"""Seconds of virtual time between two looks for ended requests: a client asks again after half of it, which
is nothing beside an answer."""


@dataclass(frozen=True)
class ClosedLoop:
    """``clients`` that ask during ``duration_s``, each the next request as soon as its last one has ended."""

    clients: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float

    def run(self, settings: ServiceSettings, first: Targets, policy: Policy) -> Result:
        """Run the load through the service under the policy, then answer the requests that are left."""
        course = Course(settings, first, policy)
        service = course.service
        for step in range(max(1, round(self.duration_s / STEP_S))):
            at_s = step * STEP_S
            course.advance(at_s)
            service.advance_decoders(at_s)
            for _ in range(self.clients - service.in_service):
                course.arrive(TracedRequest(at_s, self.prompt_tokens, self.output_tokens))
        return course.result()
