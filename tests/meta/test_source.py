"""Style that linters do not know, kept by a test; each check is shown to find something."""

import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.meta import checks
from tests.meta.checks import ROOT

Check = Callable[[str, str], Iterator[str]]

BROAD_EXCEPTS_ALLOWED = {
    "src/millpond/cli/app.py": 1,  # a bug ends in one line and an exit code
    "src/millpond/service/loop.py": 1,  # one client's bug must not end the others
    # Decision 7: what compilers, drivers and allocators raise must cost a miss and no more.
    "src/millpond/transfer/cuda.py": 1,
    "src/millpond/transfer/registration.py": 1,
    "src/millpond/transfer/streams.py": 4,
    "src/millpond/transfer/threads.py": 1,
}

EVERYWHERE = ("src", "scripts", "tests")
CHECKS: tuple[tuple[Check, tuple[str, ...], str], ...] = (
    (checks.long_code, EVERYWHERE, "def f():\n" + "    f()\n" * 70),
    (checks.long_code, EVERYWHERE, "\n" * 601),
    (checks.sleeps, ("tests",), "import time\ntime.sleep(1)"),
    (checks.sleeps, ("tests",), "from time import sleep"),
    (checks.stubs, ("src",), "def f():\n    raise NotImplementedError"),
    (checks.stubs, ("src",), "def f():\n    raise NotImplementedError('later')"),
    (checks.missing_docstrings, ("src",), "'''Doc.'''\ndef f(): ..."),
    (checks.missing_docstrings, ("src",), "'''Doc.'''\nclass C: ..."),
    (checks.missing_docstrings, ("src",), "x = 1"),
)


def test_no_finding_in_the_repository() -> None:
    findings = {
        finding
        for check, folders, _ in CHECKS
        for where, text in checks.python_files(*folders)
        for finding in check(where, text)
    }
    assert "\n".join(sorted(findings)) == ""


@pytest.mark.parametrize(("check", "planted"), [(check, bad) for check, _, bad in CHECKS])
def test_check_finds_a_planted_example(check: Check, planted: str) -> None:
    assert len(list(check("planted.py", planted))) == 1


def test_private_names_need_no_docstring() -> None:
    text = "'''Doc.'''\ndef _f(): ...\nclass _C: ..."
    assert list(checks.missing_docstrings("fine.py", text)) == []


def test_broad_excepts_stand_only_where_they_are_allowed() -> None:
    found: Counter[str] = Counter()
    for where, text in checks.python_files("src", "scripts"):
        found.update({where: len(list(checks.broad_excepts(where, text)))})
    too_many = {
        where: number
        for where, number in found.items()
        if number > BROAD_EXCEPTS_ALLOWED.get(where, 0)
    }
    assert too_many == {}


@pytest.mark.parametrize(
    "handler", ["except:", "except Exception:", "except (OSError, BaseException) as e:"]
)
def test_broad_except_is_found(handler: str) -> None:
    text = f"try:\n    f()\n{handler}\n    "
    assert len(list(checks.broad_excepts("planted.py", text + "pass"))) == 1
    assert list(checks.broad_excepts("fine.py", text + "raise")) == []


# ---------------------------------------------------------------- dependencies

IMPORTED_AS = {"import-linter": "importlinter", "pytest-timeout": "pytest_timeout", "pyzmq": "zmq"}
ENGINE_ROOMS = {
    "huggingface_hub": ("launch",),
    "torch": ("transfer", "connector", "gate"),
    "triton": ("transfer", "gate"),
    "vllm": ("connector", "gate"),
}
"""They come with the engine and not with Millpond; the import contracts say who may see them."""


def test_src_imports_only_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    allowed = {_module_name(requirement) for requirement in declared} | {"millpond"}
    undeclared = [
        f"{where} imports {name}"
        for where, text in checks.python_files("src")
        if "/stubs/" not in where
        for name in checks.third_party_imports(text) - allowed - sys.stdlib_module_names
        if where.split("/")[2] not in ENGINE_ROOMS.get(name, ())
    ]
    assert undeclared == []


def test_every_declared_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    imported = {
        name for _, text in checks.python_files("src") for name in checks.third_party_imports(text)
    }
    assert {_module_name(requirement) for requirement in declared} - imported == set()


def test_undeclared_import_is_found() -> None:
    found = checks.third_party_imports("import os, yaml.x\ndef f():\n    from attrs import define")
    assert found - sys.stdlib_module_names == {"yaml", "attrs"}


def test_each_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    decision = (ROOT / "docs/decisions/0001-dependencies.md").read_text(encoding="utf-8")
    missing = [item for item in requirements if f"`{item}`" not in decision]
    assert missing == []


def _module_name(requirement: str) -> str:
    name = requirement
    for mark in "[=<>~! ;":
        name = name.partition(mark)[0]
    return IMPORTED_AS.get(name, name.replace("-", "_"))
