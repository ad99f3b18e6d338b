"""Random numbers of the engine model, the router and made-up load."""

from itertools import islice
from statistics import fmean

from dynaplan.util import splitmix
from dynaplan.util.splitmix import UniformDraws


def test_draws_are_the_generators_published_ones() -> None:
    """The first outputs of SplitMix64 for seed 1234567, from its author's reference implementation."""
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)

    assert list(islice(UniformDraws(1234567), 3)) == [number / 2**64 for number in published]


def test_draws_spread_evenly_from_0_to_1() -> None:
    drawn = list(islice(UniformDraws(1), 100_000))

    assert all(0 <= draw < 1 for draw in drawn)
    assert abs(fmean(drawn) - 0.5) < 0.01
    assert {int(draw * 10) for draw in drawn} == set(range(10))


def test_the_same_seed_draws_the_same_and_another_seed_others() -> None:
    assert list(islice(UniformDraws(7), 5)) == list(islice(UniformDraws(7), 5))
    assert list(islice(UniformDraws(7), 5)) != list(islice(UniformDraws(8), 5))


def test_a_draw_is_never_1_so_that_a_choice_stays_within_its_candidates() -> None:
    assert splitmix._BELOW_ONE < 1
    assert int(splitmix._BELOW_ONE * 1000) == 999
