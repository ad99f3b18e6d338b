"""The score of a policy."""

from __future__ import annotations

from dynaplan.domain.planning.score import PolicyScore


def test_scores_add_up_to_attainment_and_gpu_hours():
    total = PolicyScore(90, 9, 3600, 1, 1800) + PolicyScore(10, 1, 3600, 0, 1800)
    assert total == PolicyScore(100, 10, 7200, 1, 3600)
    assert (total.attainment, total.gpu_hours, total.gpus) == (0.9, 2.0, 2.0)


def test_without_requests_and_time_there_is_no_attainment_and_no_gpu():
    assert PolicyScore().attainment is None
    assert PolicyScore().gpus == 0
