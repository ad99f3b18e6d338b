"""The signals of ``serve`` before its own loop takes them, and what it says of itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.fleet import serve
from dynaplan.fleet.serve import Serving, banner, page_line
from dynaplan.process.signals import Interruption
from tests.unit.fleet.test_launch import LAUNCH


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class EndedInDestructor:
    """Gets a signal where Python ignores exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_loses_before_serving_ends_it_before_anything_has_begun() -> None:
    launch = SimpleNamespace(runtime_dir=Path("/nowhere"))
    prepared: Any = SimpleNamespace(launch=launch)  # the first thing to begin would miss everything else
    interruption = Interruption()
    interruption.handle_signals()
    EndedInDestructor()
    interruption.leave_to_check()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(Serving(prepared, interruption).run())


class SlowStart(Serving):
    """Takes some turns of the loop until it is here; what it would start is not."""

    def _arbiter(self) -> Any:
        return None

    _shutdown = _checks = lambda self, *_: ()  # type: ignore[assignment]

    def _greet(self) -> None:
        pass

    async def _start(self, arbiter: Any) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        self.is_here = True


async def test_ready_is_not_said_before_the_supervisor_knows_that_serve_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = replace(LAUNCH, runtime_dir=tmp_path, log_dir=tmp_path, statefile=tmp_path / "statefile.json")
    serving = SlowStart(cast(Any, SimpleNamespace(launch=launch, servers=())), Interruption())
    said: list[tuple[str, bool]] = []

    class ReadyAtOnce:
        def __init__(self, *_: object) -> None:
            pass

        async def wait(self, report: Callable[[str], None]) -> None:
            pass

        async def wait_for_rest(self, report: Callable[[str], None], begun_s: float) -> None:
            serving._stop.request()

    async def drain(*_: object) -> None:
        pass

    monkeypatch.setattr(serve, "adopt_orphans", lambda: None)  # those of other tests would be ours to reap
    monkeypatch.setattr(serve, "Readiness", ReadyAtOnce)
    monkeypatch.setattr(serve, "drain", drain)
    monkeypatch.setattr(serve, "report", lambda line: said.append((line, serving.is_here)))
    assert await serving.run() == 0
    assert [is_here for line, is_here in said if "Ready" in line] == [True]


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
