"""``dynaplan export crd`` prints what ``kubectl apply`` takes."""

from __future__ import annotations

import pytest
import yaml

from dynaplan.cli import main
from dynaplan.core.manifests.worker_metadata import worker_metadata_definition


def test_the_definition_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "crd"])
    assert ended.value.code == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == [worker_metadata_definition()]
