"""What is kept for drawings: true, and never more than so much."""

from dataclasses import dataclass

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.outcome import Windows
from dynaplan.simulation.run import Result, StaticPolicy, ThinnedSeries, simulate
from dynaplan.simulation.simulated_service import SimulatedService
from tests.unit.simulation.services import every, mean, service, workers


@dataclass(frozen=True)
class At:
    at_s: float


class Scheduled:
    """Wants what a table says, and says why."""

    name, interval_s = "scheduled", 1.0

    def __init__(self, **wanted: PoolSizes) -> None:
        self.why = ""
        self._wanted = {float(at.removeprefix("at_")): targets for at, targets in wanted.items()}

    def begin(self, service: SimulatedService) -> None:
        """Nothing."""

    def evaluate(self, service: SimulatedService) -> None:
        service.advance_decoders(service.now_s)
        if service.now_s in self._wanted:
            self.why = f"because it is {service.now_s:g}"
            service.scale(self._wanted[service.now_s])


def scheduled() -> Result:
    policy = Scheduled(at_10=workers(0, 3), at_60=workers(0, 1))
    return simulate(every(0.5, 200), service(startup_s=30.5), workers(0, 1), policy)


def test_the_fleet_is_noted_when_it_changes_also_between_two_looks():
    fleet = scheduled().fleet

    assert [(each.at_s, each.serving.decode, each.wanted.decode, each.gpus) for each in fleet[:3]] == [
        (0.0, 1, 1, 1),
        (10.0, 1, 3, 3),
        (40.5, 3, 3, 3),
    ]
    assert {(each.at_s >= 60, each.serving.decode, each.wanted.decode) for each in fleet[3:]} == {
        (True, 1, 1)
    }
    assert fleet[-1].gpus == 1


def test_the_gpus_over_time_add_up_to_the_gpu_hours():
    result = scheduled()
    ends = [each.at_s for each in result.fleet[1:]] + [result.trace_s]
    held = sum(each.gpus * (end_s - each.at_s) for each, end_s in zip(result.fleet, ends, strict=True))

    assert held / 3600 == pytest.approx(result.gpu_hours)


def test_a_decision_is_kept_with_what_it_changed_and_its_reason():
    events = scheduled().events

    assert [(each.at_s, each.before, each.after, each.why) for each in events] == [
        (10.0, workers(0, 1), workers(0, 3), "because it is 10"),
        (60.0, workers(0, 3), workers(0, 1), "because it is 60"),
    ]


def test_a_policy_that_does_not_say_why_has_decisions_without_a_reason():
    class Silent(StaticPolicy):
        def evaluate(self, service: SimulatedService) -> None:
            service.scale(workers(0, 2))

    assert [each.why for each in simulate(every(1.0, 20), service(), workers(), Silent()).events] == [""]


def test_windows_hold_the_requests_that_arrived_in_them_and_together_all():
    result = simulate(every(0.5, 200, prompt_tokens=100), service(), workers(), StaticPolicy())
    windows = list(result.outcome.windows)

    assert result.outcome.windows.width_s == 1.0
    assert [each.requests for each in windows] == [2] * 100
    assert windows[0].prompt_tokens == 200
    assert windows[0].output_tokens == 22
    assert sum(each.answered for each in windows) == result.outcome.requests == 200
    assert sum(each.both_met for each in windows) == result.outcome.both_met
    assert mean(windows[0].itl_ms) == pytest.approx(10.0)


def test_windows_that_get_too_many_become_longer_and_lose_nothing():
    windows = Windows()
    for request in every(0.5, 2001):
        windows.of(request.arrival_s).arrive(request)
        windows.of(request.arrival_s).ttft_ms.add(request.arrival_s)

    assert windows.width_s == 8.0
    assert [each.requests for each in windows] == [16] * 125 + [1]
    assert sum(each.ttft_ms.total for each in windows) == sum(index * 0.5 for index in range(2001))
    assert list(windows)[-1].ttft_ms.highest == 1000.0


def test_a_request_long_after_the_others_does_not_make_many_windows():
    windows = Windows()
    for arrival_s in (0.0, 1e9):
        windows.of(arrival_s).arrive(TracedRequest(arrival_s, 1, 1))

    assert len(list(windows)) <= Windows.MAX_COUNT
    assert sum(each.requests for each in windows) == 2


def test_a_request_that_is_never_answered_is_missing_in_its_window():
    requests = [TracedRequest(0.0, 10**6, 1), TracedRequest(0.5, 100, 1)]

    (window,) = simulate(requests, service(), workers(), StaticPolicy()).outcome.windows

    assert (window.requests, window.answered, window.both_met) == (2, 1, 1)


def test_ever_fewer_of_the_moments_are_kept_the_longer_it_gets_and_always_the_last():
    kept: ThinnedSeries[At] = ThinnedSeries(most=10)
    for second in range(1000):
        kept.add(At(float(second)))
        assert len(kept.items()) <= 10
        assert kept.items()[-1] == At(float(second))

    moments = [each.at_s for each in kept.items()]
    assert moments == sorted(moments)
    assert len(moments) >= 4
