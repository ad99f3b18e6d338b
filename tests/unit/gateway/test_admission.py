"""What is checked of a request before its body is read."""

from __future__ import annotations

import pytest

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.gateway.admission import Admission


@pytest.mark.parametrize(("host", "is_refused"), [("LOCALHOST", True), ("127.1", True), ("0.0.0.0", False)])
def test_whatever_name_loopback_is_given_by_a_page_whose_name_leads_there_is_refused(
    host: str, is_refused: bool
) -> None:
    browsers = Admission(FrontendSettings(host=host)).browsers
    refusal = browsers.refuse({"Host": "evil.example"}, is_change=False)
    assert (refusal is not None) is is_refused
