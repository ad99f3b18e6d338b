"""The banner names the web page, and shows its token to nobody but the user at the terminal."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.serve import banner, page_line
from tests.unit.fleet.test_launch import LAUNCH


def test_the_pages_address_has_its_token_on_a_terminal_and_nowhere_else() -> None:
    address = page_line(LAUNCH, "secret", is_private=True)
    assert address.startswith("http://127.0.0.1:8000/ui?token=")
    assert f"page         {address}" in banner(LAUNCH, is_simulated=True, page=address)
    in_a_file = page_line(LAUNCH, "secret", is_private=False)
    assert in_a_file == "`dynaplan ui --namespace ns` prints the address of http://127.0.0.1:8000/ui"


def test_a_deployment_without_page_names_none() -> None:
    without = replace(LAUNCH, config={**LAUNCH.config, "Frontend": {"page": False}})
    assert page_line(without, "secret", is_private=True) == ""
    assert page_line(LAUNCH, "", is_private=True) == ""
