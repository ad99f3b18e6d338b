"""The catalogue of models that can be pulled."""

from dynaplan.engines.model_catalogue import CATALOGUE


def test_a_size_is_told_in_megabytes() -> None:
    assert CATALOGUE["smollm2"].size == "98 MB"
