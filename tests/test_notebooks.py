"""Every notebook runs, cell by cell, from a clean start, with what the extra notebook installs and no more."""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def modules(requirements: list[str]) -> set[str]:
    """The modules of packages, which all have their package's name: pytest-xdist is pytest_xdist."""
    return {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in requirements}


INSTALLED = modules(PROJECT["dependencies"] + EXTRAS["notebook"])
HERE = {"notebook", "test", "dev"}  # the tests need the packages of the last two themselves
OTHERS = modules([each for extra, packages in EXTRAS.items() if extra not in HERE for each in packages]) - INSTALLED


def cells(path: Path) -> dict[str, str]:
    """The source of each cell of code, by where it is."""
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {f"{path.name}, cell {c['id']}": "".join(c["source"]) for c in found if c["cell_type"] == "code"}


def imported(source: str) -> Iterator[str]:
    """The modules that a cell imports, without what is in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name.split(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).split(".")[0]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_only_what_its_extra_installs(path: Path) -> None:
    found = {name for source in cells(path).values() for name in imported(source)}
    assert found - set(sys.stdlib_module_names) - INSTALLED == {"jaxgpt"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHERS:
        monkeypatch.setitem(sys.modules, name, None)  # cannot be imported, as where its extra is not installed
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    variables: dict[str, Any] = {"__name__": "__main__"}
    for where, source in cells(path).items():
        exec(compile(source, where, "exec"), variables)
