"""The cost of a hand-off has one home, whose units agree wherever it is read."""

import pytest

from dynaplan.engines.timing_model.hand_off import hand_off_s
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel


def test_a_hand_off_takes_1_ms_and_2_us_for_each_token() -> None:
    assert hand_off_s(0) == 0.001
    assert hand_off_s(1000) == pytest.approx(0.001 + 0.002048)


def test_the_queueing_model_counts_the_same_in_ms() -> None:
    fields = ServiceModel.__dataclass_fields__
    base_ms, per_token_ms = fields["transfer_ms"].default, fields["transfer_ms_per_token"].default

    assert base_ms + 1000 * per_token_ms == pytest.approx(1000 * hand_off_s(1000))
