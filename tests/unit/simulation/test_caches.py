"""Where prompts are expected to be cached: by the engines' events, or by prediction."""

from dynaplan.gateway.kv_routing.index import PrefixIndex
from dynaplan.simulation.router import PredictedCaches, ReportedCaches


def test_what_was_sent_is_expected_by_prediction_alone():
    reported, predicted = ReportedCaches(), PredictedCaches(PrefixIndex(time_to_live_s=120.0))
    for caches in (reported, predicted):
        caches.sent((1, 2), 7, 0.0)

    assert reported.overlaps((1, 2, 3), [], 1.0) == {}
    assert predicted.overlaps((1, 2, 3), [], 1.0) == {7: 2}
    assert predicted.overlaps((1, 2, 3), [], 121.0) == {}
