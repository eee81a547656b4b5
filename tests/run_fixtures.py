"""Fixtures of the tests of runs, taken by `pytest_plugins`: a text, and a run on it."""

import shutil
from pathlib import Path

import pytest
from bigram import Bigram, config, text

from jaxgpt.training import opened, run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run on it that was never interrupted."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "text.txt").write_text(text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGPT_CACHE", str(folder / "cache"))
        patch.setattr(run, "Program", Bigram)
        run.train(config(folder / "text.txt"), folder / "straight")
    return folder


@pytest.fixture
def cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXGPT_CACHE", str(shared / "cache"))
    monkeypatch.setattr(run, "Program", Bigram)
    monkeypatch.setattr(opened, "Program", Bigram)
    return shared / "cache"


@pytest.fixture
def data(cache: Path) -> Path:
    """A text; runs on it train a bigram table."""
    return cache.parent / "text.txt"


@pytest.fixture
def straight(data: Path, tmp_path: Path) -> Path:
    """A copy of the run on it."""
    return Path(shutil.copytree(data.parent / "straight", tmp_path / "straight"))
