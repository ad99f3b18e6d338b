"""Finding the running deployment: what a user is told when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaplan.domain.errors import DeploymentError
from dynaplan.supervisor.deployments import find_deployment


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(directory))
    return directory


@pytest.mark.parametrize("namespace", [None, "mine"])
@pytest.mark.parametrize("torn", ["", '{"namespace": "mi', "[]"])
def test_a_torn_statefile_is_named_with_what_comes_of_it(
    state: Path, namespace: str | None, torn: str
) -> None:
    (state / "mine.json").write_text(torn)
    with pytest.raises(DeploymentError) as raised:
        find_deployment(namespace)
    assert f"{state / 'mine.json'}: it is " in str(raised.value)
    assert "`dynaplan serve` sets it aside" in str(raised.value)


def test_where_there_is_no_statefile_none_is_named(state: Path) -> None:
    (state / ".startup_times.json").write_text("{}")
    with pytest.raises(DeploymentError) as raised:
        find_deployment()
    assert "sets it aside" not in str(raised.value)
