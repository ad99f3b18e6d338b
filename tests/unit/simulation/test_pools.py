"""An engine's cache, as the router hears of it."""

from dynaplan.routing.kv_index import KvIndex
from dynaplan.simulation.pools import CacheChanges


def test_changes_are_told_in_their_order_and_each_once():
    changes, index = CacheChanges(), KvIndex()
    changes.stored(1)
    changes.removed(1)
    changes.stored(2)
    changes.end_step(1.0)
    changes.stored(3)
    changes.end_step(2.0)

    changes.publish(index, 7, 1.5)
    assert [index.overlaps([block]) for block in (1, 2, 3)] == [{}, {7: 1}, {}]
    index.remove(7, [2])
    changes.publish(index, 7, 2.0)
    assert [index.overlaps([block]) for block in (1, 2, 3)] == [{}, {}, {7: 1}]
