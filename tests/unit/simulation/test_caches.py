"""Where prompts are expected to be cached: as engines tell, or as what was sent makes it probable."""

from dynaplan.gateway.kv_routing.prefix_index import PrefixIndex
from dynaplan.simulation.caches import PredictedCaches, ToldCaches


def test_what_was_sent_is_expected_by_prediction_alone():
    told, predicted = ToldCaches(), PredictedCaches(PrefixIndex(time_to_live_s=120.0))
    for caches in (told, predicted):
        caches.sent((1, 2), 7, 0.0)

    assert told.overlaps((1, 2, 3), [], 1.0) == {}
    assert predicted.overlaps((1, 2, 3), [], 1.0) == {7: 2}
    assert predicted.overlaps((1, 2, 3), [], 121.0) == {}
