import pytest

from dynaplan.util.entry_points import load_entry_point
from dynaplan.util.errors import ConfigError


def test_what_needs_a_cluster_is_found_by_its_name() -> None:
    assert load_entry_point("dynaplan.stores", "kubernetes").__name__ == "ClusterStore"
    assert load_entry_point("dynaplan.connectors", "kubernetes").__name__ == "connect_cluster"


def test_a_name_that_no_package_has_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match=r"no installed package has 'moon' among its dynaplan\.stores"):
        load_entry_point("dynaplan.stores", "moon")
