"""Loading a graph: its module, the original's API by its own name, and the edges."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaplan.config.settings.servers import COMPAT_VARIABLE
from dynaplan.graph.loading import COMPAT_DIR, compat_environment, enable_compat, import_graph_module
from dynaplan.sdk import Graph, load_graph
from dynaplan.util.errors import ConfigError, GraphError
from tests.fakes.graph_files import Write

NAMES = """
from dynamo.sdk import (DYNAMO_IMAGE, AbstractService, abstract_endpoint, api, async_on_start, depends,
    dynamo_context, endpoint, liveness, on_shutdown, readiness, service)
from dynamo.sdk.core.protocol.interface import ComponentType, DynamoTransport
from dynamo.sdk.lib.config import ServiceConfig
from dynamo._core import DistributedRuntime, VirtualConnectorClient
from dynamo.runtime.logging import configure_dynamo_logging
import dynaplan.sdk
assert dynamo_context is dynaplan.sdk.dynamo_context and endpoint is dynaplan.sdk.endpoint
"""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(COMPAT_DIR)])


def test_the_modules_are_there_only_where_they_were_asked_for() -> None:
    enable_compat({})
    assert str(COMPAT_DIR) not in sys.path
    enable_compat({COMPAT_VARIABLE: "dynamo"})
    enable_compat({COMPAT_VARIABLE: "dynamo"})
    assert sys.path.count(str(COMPAT_DIR)) == 1


def test_an_api_that_there_is_not_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--compat dynamos: there is no such API\n  Did you mean 'dynamo'"):
        enable_compat({COMPAT_VARIABLE: "dynamos"})


def test_a_program_of_its_own_finds_the_names_of_the_original_and_keeps_its_search_path(
    tmp_path: Path,
) -> None:
    environment = compat_environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert environment["PYTHONPATH"] == f"{COMPAT_DIR}{os.pathsep}{tmp_path}"
    assert subprocess.run([sys.executable, "-c", NAMES], env=environment).returncode == 0


APP = """
from types import SimpleNamespace
from dynamo.sdk import service

def app(*paths):
    return SimpleNamespace(routes=[SimpleNamespace(path=path) for path in ("/docs", "/openapi.json", *paths)])

@service(dynamo={"namespace": "a"}, app=app(), traffic={"timeout": 3}, image="none")
class Quiet: pass

@service(dynamo={"namespace": "a"}, app=app("/mine"))
class Loud: pass
assert Quiet.config.namespace == "a"
"""


def test_routes_of_an_app_that_are_not_served_are_named() -> None:
    run = subprocess.run(
        [sys.executable, "-c", APP], env=compat_environment(os.environ), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "Warning: /mine of a FastAPI app is not served: make it an @api method\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package ``shipped`` with a module ``agg``; where it lies."""
    folder = tmp_path / "installed" / "shipped"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "agg.py").write_text("PLACE = 'installed'\n")
    (folder / "both.py").write_text("PLACE = 'installed'\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder.parent)])
    yield folder
    for name in [each for each in sys.modules if each.startswith("shipped")]:
        del sys.modules[name]


@pytest.mark.parametrize("is_package", [True, False])
def test_a_folder_of_ones_own_does_not_hide_the_installed_modules(
    installed: Path, tmp_path: Path, is_package: bool
) -> None:
    own = tmp_path / "work" / "shipped"
    own.mkdir(parents=True)
    if is_package:
        (own / "__init__.py").write_text("")
    (own / "mine.py").write_text("from shipped.agg import PLACE\n" if is_package else "PLACE = 'installed'\n")
    (own / "both.py").write_text("PLACE = 'own'\n")
    places = [import_graph_module(f"shipped.{name}", own.parent).PLACE for name in ("agg", "mine", "both")]
    assert places == ["installed", "installed", "own"]
    locations = importlib.util.find_spec("shipped").submodule_search_locations
    assert str(installed) in locations, "the names of its modules are suggested"


SERVICES = """
    from dynaplan.sdk import depends, service

    @service
    class Leaf: pass

    @service
    class Middle:
        leaf = depends(Leaf)

    @service
    class Side: pass

    @service
    class Top:
        middle = depends(Middle)
        side = depends(Side)
"""


def names(graph: Graph) -> list[str]:
    return [service.name for service in graph.services()]


def test_without_a_link_every_dependency_runs(write: Write, tmp_path: Path) -> None:
    write("plain_services.py", SERVICES)
    assert names(load_graph("plain_services:Top", tmp_path)) == ["Top", "Middle", "Leaf", "Side"]


def test_with_links_only_linked_dependencies_run(write: Write, tmp_path: Path) -> None:
    write("some_services.py", SERVICES)
    write("one_link.py", "from some_services import *\nTop.link(Middle)\n")
    graph = load_graph("one_link:Top", tmp_path)
    assert names(graph) == ["Top", "Middle"]
    assert graph.entry.dependencies["middle"] is graph.service("Middle")
    assert graph.service("Middle").dependencies == {}


def test_a_service_without_any_edge_keeps_its_dependencies(write: Write, tmp_path: Path) -> None:
    write("edge_services.py", SERVICES)
    write("lower_edge.py", "from edge_services import *\nMiddle.link(Leaf)\n")
    assert names(load_graph("lower_edge:Top", tmp_path)) == ["Top", "Middle", "Leaf", "Side"]


def test_linking_twice_is_linking_once(write: Write, tmp_path: Path) -> None:
    write("twice_services.py", SERVICES)
    write("twice.py", "from twice_services import *\nTop.link(Middle)\nTop.link(Middle)\n")
    assert names(load_graph("twice:Top", tmp_path)) == ["Top", "Middle"]


def test_two_graphs_of_the_same_services_do_not_mix(write: Write, tmp_path: Path) -> None:
    write("shared_services.py", SERVICES)
    write("left.py", "from shared_services import *\nTop.link(Middle).link(Leaf)\n")
    write("right.py", "from shared_services import *\nimport left\nTop.link(Side)\n")
    right = load_graph("right:Top", tmp_path)
    left = load_graph("left:Top", tmp_path)
    assert names(right) == ["Top", "Side"]
    assert names(left) == ["Top", "Middle", "Leaf"]
    assert names(load_graph("right:Top", tmp_path)) == ["Top", "Side"]


def test_links_in_the_module_of_the_services_come_with_them(write: Write, tmp_path: Path) -> None:
    write("linked_services.py", SERVICES + "\n    Top.link(Middle)\n")
    write("user_of_linked.py", "from linked_services import Top\n")
    assert names(load_graph("user_of_linked:Top", tmp_path)) == ["Top", "Middle"]


def test_a_reloaded_module_forgets_the_links_it_no_longer_states(write: Write, tmp_path: Path) -> None:
    write("reload_services.py", SERVICES)
    file = write("reloaded.py", "from reload_services import *\nTop.link(Middle)\nTop.link(Side)\n")
    assert names(load_graph("reloaded:Top", tmp_path)) == ["Top", "Middle", "Side"]
    file.write_text("from reload_services import *\nTop.link(Side)  # the other one is gone\n")
    importlib.reload(sys.modules["reloaded"])
    assert names(load_graph("reloaded:Top", tmp_path)) == ["Top", "Side"]


def test_a_linked_subclass_takes_the_place_of_the_dependency(write: Write, tmp_path: Path) -> None:
    write("base_services.py", SERVICES)
    write(
        "special.py",
        """
        from base_services import Top, Middle
        from dynaplan.sdk import service

        @service
        class Special(Middle.inner): pass

        Top.link(Special)
        """,
    )
    graph = load_graph("special:Top", tmp_path)
    assert names(graph) == ["Top", "Special"]
    assert graph.entry.dependencies["middle"].name == "Special"


def test_an_interface_without_a_linked_service_cannot_be_served(write: Write, tmp_path: Path) -> None:
    write(
        "abstract.py",
        """
        from dynaplan.sdk import AbstractService, depends, service

        class Shape(AbstractService): pass

        @service
        class Top:
            shape = depends(Shape)
        """,
    )
    with pytest.raises(GraphError, match=r"Service Shape is not servable\. Please use link to override"):
        load_graph("abstract:Top", tmp_path)


def test_services_that_depend_on_each_other_are_listed_once(write: Write, tmp_path: Path) -> None:
    write(
        "circle.py",
        """
        from dynaplan.sdk import AbstractService, depends, service

        class Back(AbstractService): pass

        @service
        class Low:
            back = depends(Back)

        @service
        class High(Back):
            low = depends(Low)

        High.link(Low)
        Low.link(High)
        """,
    )
    graph = load_graph("circle:High", tmp_path)
    assert names(graph) == ["High", "Low"]
    assert graph.service("Low").dependencies["back"] is graph.entry


def test_dotted_attributes_follow_dependencies(write: Write, tmp_path: Path) -> None:
    write("dotted.py", SERVICES)
    assert names(load_graph("dotted:Top.middle", tmp_path)) == ["Middle", "Leaf"]
    with pytest.raises(GraphError, match=r"(?s)\"midle\" is not a dependency of Top.*'middle'"):
        load_graph("dotted:Top.midle", tmp_path)


def test_a_module_alone_stands_for_its_root_service(write: Write, tmp_path: Path) -> None:
    write("rooted.py", SERVICES)
    assert load_graph("rooted", tmp_path).entry.name == "Top"


def test_a_module_without_services_or_with_two_roots_is_refused(write: Write, tmp_path: Path) -> None:
    write("barren.py", "x = 1\n")
    write("two_roots.py", SERVICES + "\n    @service\n    class Second: pass\n")
    with pytest.raises(GraphError, match="No DynamoService instances found in module"):
        load_graph("barren", tmp_path)
    with pytest.raises(
        GraphError, match=r"Multiple root services found in module 'two_roots': \['Second', 'Top'\]"
    ):
        load_graph("two_roots", tmp_path)


@pytest.mark.parametrize("has_init", [True, False])
@pytest.mark.parametrize("identifier", ["graphs/mine.py:Top", "graphs.mine:Top"])
def test_a_file_in_the_working_directory_wins_over_an_installed_module(
    write: Write, tmp_path: Path, has_init: bool, identifier: str
) -> None:
    import graphs  # noqa: F401  our own package of that name

    if has_init:
        write("graphs/__init__.py", "")
    write("graphs/mine.py", SERVICES)
    graph = load_graph(identifier, tmp_path)
    assert names(graph) == ["Top", "Middle", "Leaf", "Side"]
    assert graph.module_file == tmp_path / "graphs" / "mine.py"
    assert load_graph(identifier, tmp_path).entry.inner is graph.entry.inner


def test_a_path_may_be_named_with_its_neighbours_imported(write: Write, tmp_path: Path) -> None:
    write("parts/pieces.py", SERVICES)
    write("parts/whole.py", "from parts.pieces import *\nTop.link(Side)\n")
    assert names(load_graph("parts/whole.py:Top", tmp_path)) == ["Top", "Side"]


def test_same_named_modules_of_two_directories_do_not_mix(write: Write, tmp_path: Path) -> None:
    write("a/twin_graph.py", SERVICES + "\n    Top.link(Side)\n")
    write("b/twin_graph.py", SERVICES + "\n    Top.link(Middle)\n")
    assert names(load_graph("twin_graph:Top", tmp_path / "a")) == ["Top", "Side"]
    assert names(load_graph("twin_graph:Top", tmp_path / "b")) == ["Top", "Middle"]
    assert names(load_graph("twin_graph:Top", tmp_path / "a")) == ["Top", "Side"]


@pytest.mark.parametrize("identifier", ["", ":", ":Top", "a:", "a:b:c", "a:1b", "a:b..c", "a:b-c"])
def test_an_identifier_of_another_form_is_refused(identifier: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"Invalid import string .*, must be in format"):
        load_graph(identifier, tmp_path)


@pytest.mark.parametrize(
    ("identifier", "message"),
    [
        ("no_such_module:Top", "No module named 'no_such_module'"),
        ("graphs.disag:Frontend", r"(?s)No module named 'graphs.disag'.*Did you mean 'graphs.disagg'"),
        ("present.deeper:Top", "No module named 'present.deeper'"),
        ("missing.py:Top", "missing.py: no such file"),
        ("notes.txt:Top", "notes.txt is not a Python file"),
        ("../outside.py:Top", "outside.py does not lie under the working directory"),
        ("present:Tpo", r"(?s)Attribute \"Tpo\" not found in module \"present\".*'Top'"),
        ("present:number", '"number" in module "present" is not a service but int'),
        ("broken:Top", r"(?s)cannot import 'broken': ZeroDivisionError.*broken.py, line 2"),
        ("leaves:Top", r"(?s)cannot import 'leaves': SystemExit: 3.*leaves.py, line 2"),
        ("wrong_syntax:Top", "cannot import 'wrong_syntax': SyntaxError"),
        ("needs:Top", "cannot import 'needs': ModuleNotFoundError: No module named 'no_such_library'"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_message(
    identifier: str, message: str, write: Write, tmp_path: Path
) -> None:
    write("inside/present.py", SERVICES + "\n    number = 1\n")
    write("inside/broken.py", "\n1 / 0\n")
    write("inside/leaves.py", "\nraise SystemExit(3)\n")
    write("inside/wrong_syntax.py", "def\n")
    write("inside/needs.py", "import no_such_library\n")
    write("inside/notes.txt", "")
    write("outside.py", SERVICES)
    with pytest.raises(GraphError, match=message):
        load_graph(identifier, tmp_path / "inside")


def test_asking_a_graph_for_a_service_it_lacks_names_the_nearest(write: Write, tmp_path: Path) -> None:
    write("asked.py", SERVICES)
    with pytest.raises(GraphError, match=r"(?s)no service 'Midle'.*'Middle'"):
        load_graph("asked:Top", tmp_path).service("Midle")


def test_two_services_of_one_name_are_refused(write: Write, tmp_path: Path) -> None:
    write("namesake.py", "from dynaplan.sdk import service\n@service\nclass Leaf: pass\n")
    write(
        "clash.py",
        """
        import namesake
        from dynaplan.sdk import depends, service

        @service
        class Leaf: pass

        @service
        class Top:
            one = depends(Leaf)
            two = depends(namesake.Leaf)
        """,
    )
    with pytest.raises(GraphError, match="two services named Leaf"):
        load_graph("clash:Top", tmp_path)
