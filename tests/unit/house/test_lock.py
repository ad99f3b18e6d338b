"""requirements.lock fits setup.cfg on every Python that is promised, and docs/licences.md fits the lock."""

from __future__ import annotations

import configparser
import re

import pytest
from packaging.requirements import Requirement

from tests.licences import LOCK, PAGE, locked, version_of, versions
from tests.unit.house.source import REPOSITORY

PYTHONS = ("3.11", "3.12", "3.13")


def environment(python: str) -> dict[str, str]:
    """The markers of that Python on the machines that dynaplan is for."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "extra": "",
    }


def setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    return config


def required() -> list[Requirement]:
    """The requirements of dynaplan, and of the extra with which the README serves a real model."""
    config = setup()
    lines = [config["options"]["install_requires"], config["options.extras_require"]["llamacpp"]]
    return [Requirement(line) for line in "\n".join(lines).splitlines() if line]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def holds(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(environment(python))


@pytest.mark.parametrize("python", PYTHONS)
def test_each_requirement_has_one_locked_version_that_satisfies_it(python: str) -> None:
    of_python = [each for each in locked() if holds(each, python)]
    names = [plain(each.name) for each in of_python]
    assert sorted(set(names)) == sorted(names), "a package has two versions for one Python"
    pins = {plain(each.name): version_of(each) for each in of_python}
    wanted = [each for each in required() if holds(each, python)]
    assert {
        str(each) for each in wanted if not each.specifier.contains(pins.get(plain(each.name), "0"))
    } == set(), "tox -e lock"


def test_the_pythons_of_the_lock_are_those_that_are_promised() -> None:
    promised = re.findall(r"Python :: (3\.\d+)", setup()["metadata"]["classifiers"])
    assert tuple(promised) == PYTHONS


def test_every_locked_package_has_hashes_and_no_index_is_named() -> None:
    text = LOCK.read_text()
    for block in re.split(r"\n(?=\S)", text):
        if not block.startswith("#"):
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block
    assert "://" not in text


def test_every_locked_package_is_in_the_table_of_licences() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| (\d[^|]*) \| ([^|]+) \|", PAGE.read_text(), re.M)
    assert {name: found.split(", ") for name, found, _ in rows} == versions(), "tox -e lock"
    assert [name for name, _, licence in rows if licence.strip() in ("", "not stated", "UNKNOWN")] == []
