"""The table of engines: each can be chosen and checked where it is not installed, and says how to get it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import get_type_hints

import pytest

from dynaplan.engines import registry
from dynaplan.engines.port import Engine, EngineContext
from dynaplan.util.errors import ConfigError

CONTEXT = EngineContext("ns_VllmWorker")

KINDS = {name: registry.engine_kind(name) for name in registry.ENGINES}
REQUIREMENTS = {name: kind.requirement for name, kind in KINDS.items() if kind.requirement}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("vlmm", "Did you mean 'vllm'?"), ("lamacpp", "Did you mean 'llamacpp'?"), ("warp", "sim, llamacpp,")],
)
def test_an_unknown_engine_is_refused_with_the_nearest_one(name: str, expected: str) -> None:
    for refused in (
        lambda: registry.make_engine(name, {}, CONTEXT),
        lambda: registry.check_engine(name, {}, 1),
    ):
        with pytest.raises(ConfigError, match=f"engine is '{name}', which is unknown") as caught:
            refused()
        assert expected in caught.value.hint


def test_every_engine_is_imported_where_none_of_their_packages_is() -> None:
    packages = sorted({requirement.module for requirement in REQUIREMENTS.values()} | {"torch"})
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in packages)
    program = f"""import sys
{blocked}
from importlib import import_module
from dynaplan.engines.registry import ENGINES
for name, module in ENGINES.items():
    assert import_module(f"dynaplan.engines.{{module}}").KIND.name == name
for module in ("sim.engine", "llamacpp.engine", "server.engine"):
    import_module(f"dynaplan.engines.{{module}}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", registry.ENGINES)
def test_the_type_checker_compares_every_engine_with_the_port(name: str) -> None:
    assert get_type_hints(KINDS[name].make)["return"] is Engine


def test_an_engine_is_imported_only_when_it_is_chosen() -> None:
    check = "from dynaplan.engines import registry; registry.check_engine('sim', {}, 1)"
    program = f"import sys; {check}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(done.stdout.split())
    assert "dynaplan.engines.sim.profiles" in modules
    assert not modules & {"aiohttp", "zmq", "dynaplan.engines.sim.engine"}, "serve, which checks, needs none"
    assert not modules & {f"dynaplan.engines.{name}" for name in REQUIREMENTS}


def test_every_engine_that_loads_a_model_itself_has_a_kind_of_model_and_a_requirement() -> None:
    kinds = {name for name, kind in KINDS.items() if kind.model_kind}
    assert set(registry.ENGINES) - {"sim", "command"} == kinds == set(REQUIREMENTS)


# -- requirements --------------------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.mark.parametrize("engine", REQUIREMENTS)
def test_an_engine_that_is_not_installed_is_refused_with_the_line_that_installs_it(
    engine: str, nothing_installed: None
) -> None:
    with pytest.raises(ConfigError, match=f"engine is '{engine}', which is not installed") as caught:
        REQUIREMENTS[engine].check(engine, {})
    assert caught.value.hint.startswith(f"pip install '{REQUIREMENTS[engine].package}'")


@pytest.mark.parametrize("engine", sorted(REQUIREMENTS.keys() - {"llamacpp"}))
@pytest.mark.parametrize("words", ["{}", "{} serve", ["{}", "-m", "server"]])
def test_a_program_that_is_named_takes_the_place_of_an_installed_one(
    engine: str, words: str | list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    program = tmp_path / "program"
    given = words.format(program) if isinstance(words, str) else [word.format(program) for word in words]
    option = REQUIREMENTS[engine].option
    with pytest.raises(ConfigError, match=f"{option} is .*, but there is no program {program}"):
        REQUIREMENTS[engine].check(engine, {option: given})
    program.touch(mode=0o700)
    REQUIREMENTS[engine].check(engine, {option: given})


@pytest.mark.parametrize("name", ["server --foo", "it's", "~nobody-here"])
def test_the_whole_of_what_names_a_llama_server_is_its_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "server").touch(mode=0o700)
    given = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(ConfigError, match=f"there is no program {given}"):
        REQUIREMENTS["llamacpp"].check("llamacpp", {"llama-server": given})
    (tmp_path / name).touch(mode=0o700)
    REQUIREMENTS["llamacpp"].check("llamacpp", {"llama-server": str(tmp_path / name)})


def test_the_llama_server_of_the_path_may_be_asked_for(nothing_installed: None) -> None:
    with pytest.raises(ConfigError, match="there is no program llama-server"):
        REQUIREMENTS["llamacpp"].check("llamacpp", {"llama-server": True})


@pytest.mark.parametrize("engine", REQUIREMENTS)
def test_a_command_on_the_path_is_enough_and_does_not_raise(
    engine: str, nothing_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = REQUIREMENTS[engine].command
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/it" if name == wanted else None)
    REQUIREMENTS[engine].check(engine, {})


def test_the_line_that_installs_an_engine_is_its_extra() -> None:
    setup = ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    extras = {name: text.strip() for name, text in setup["options.extras_require"].items()}
    for name, requirement in REQUIREMENTS.items():
        assert extras[name] == requirement.package
