"""The run folder: what is stored, what a resumed run may change, whose folder it is, who uses it."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from bigram import TINY, config, snapshot, text

from jaxgpt.config import RunConfig
from jaxgpt.config_file import from_json
from jaxgpt.errors import UserError
from jaxgpt.training import folder, run

pytest_plugins = ["run_fixtures"]


def test_configuration_is_stored_resolved(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(data.parent)
    asked = config(Path("text.txt"), tokenizer="bpe", dtype="auto", steps=1)
    asked = dataclasses.replace(asked, model=dataclasses.replace(TINY, vocab=2000))
    run.train(asked, tmp_path / "run")
    stored = from_json((tmp_path / "run" / "config.json").read_text(), "")
    assert stored.data == str(data)
    assert stored.dtype == "fp32"
    assert 256 < stored.model.vocab < 2000
    # The same call, from elsewhere, and the run alone: the tokens are those of the run, and are not made again.
    monkeypatch.chdir(tmp_path)
    assert run.train(dataclasses.replace(asked, data=str(data)), tmp_path / "run").step == 1
    assert run.train(stored, tmp_path / "run", frozenset()).step == 1
    assert run.train(dataclasses.replace(stored, steps=2), tmp_path / "run", frozenset({"steps"})).step == 2
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_what_may_change_comes_from_the_run_unless_it_is_given(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    run.train(config(data, steps=3, mesh="tensor=2"), where)
    given = config(data, steps=4, mesh="", log_every=7)
    capsys.readouterr()
    run.train(given, where, frozenset({"steps"}))
    stored = folder.stored_config(where)
    assert (stored.steps, stored.mesh, stored.log_every) == (4, "tensor=2", 2)
    assert "3 -> 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 1.0, "seed": 3}, ("lr: 1.0, 30.0", "seed: 3, 0")),
        ({"model": dataclasses.replace(TINY, layers=2)}, ("model.layers: 2, 1",)),
        ({"steps": 6}, ("steps: 6, 12",)),
        ({"validation": 0.2}, ("validation: 0.2, 0.05",)),
    ],
)
def test_another_configuration_is_refused_with_what_differs(
    changes: dict[str, Any], named: tuple[str, ...], data: Path, straight: Path
) -> None:
    before = snapshot(straight)
    with pytest.raises(UserError) as caught:
        run.train(config(data, **changes), straight)
    assert all(name in str(caught.value) for name in named)
    assert snapshot(straight) == before


def test_other_tokens_are_refused_but_a_text_may_move(data: Path, straight: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copy(data, tmp_path / "moved.txt"))
    assert run.train(config(moved), straight).step == 12
    assert run.train(config(moved, steps=13), straight).step == 13
    other = tmp_path / "other.txt"
    other.write_text(text()[:-50])
    with pytest.raises(UserError, match=r"data: .*other\.txt, .*moved"):
        run.train(config(other, steps=13), straight)
    moved.write_text(text() + "more")
    with pytest.raises(UserError, match="has changed since the run began"):
        run.train(config(moved, steps=14), straight)


def test_a_folder_of_something_else_is_refused_and_not_touched(data: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        run.train(config(data), foreign)
    (foreign / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UserError, match="not a configuration of jaxgpt"):
        run.train(config(data), foreign)
    assert {e.name for e in foreign.iterdir()} == {"thesis.tex", "config.json"}
    with pytest.raises(UserError, match="Not a directory"):
        run.train(config(data), foreign / "thesis.tex")
    assert (foreign / "thesis.tex").read_text() == "mine"


def test_a_run_in_use_is_refused(data: Path, straight: Path) -> None:
    before = snapshot(straight)
    with folder.hold(straight, print), pytest.raises(UserError, match=f"in use by another process .*{os.getpid()}"):
        run.train(config(data), straight)
    assert snapshot(straight) == before


def test_a_lock_that_was_removed_before_it_was_taken_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process could make it anew, and both would train."""
    real = folder._lock

    def late(lock: Any, where: Path, say: Any) -> None:
        (where / folder.LOCK).unlink()
        real(lock, where, say)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_lock", late)
        with pytest.raises(UserError, match="another process has just ended in it; give the same command again"):
            folder.hold(tmp_path / "run", print).__enter__()
    with folder.hold(tmp_path / "run", print):
        pass


def test_a_run_that_cannot_begin_leaves_no_folder(data: Path, tmp_path: Path) -> None:
    for changes in (
        {"mesh": "data=3"},
        {"data": str(tmp_path / "none")},
        {"model": dataclasses.replace(TINY, seq=10**6)},
    ):
        with pytest.raises(UserError):
            run.train(config(data, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_runs_without_a_name_are_numbered_and_never_overwritten(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny-2").mkdir(parents=True)
    names = [run.train(config(data, steps=1), None, None, "tiny").run.name for _ in range(2)]
    assert names == ["tiny-1", "tiny-3"]


def test_another_mesh_begins_with_another_cut_of_the_pipeline(tmp_path):
    """How a pipeline was cut is of the mesh that it was cut for."""
    stored = RunConfig(mesh="pipe=2", schedule="interleaved", virtual_stages=2, stages="1,1,1,3")
    moved = dataclasses.replace(stored, mesh="data=2")
    found = folder.merge(tmp_path, moved, stored, frozenset({"mesh"}))
    assert (found.mesh, found.schedule, found.virtual_stages, found.stages) == ("data=2", "1f1b", 1, "auto")
    asked = dataclasses.replace(stored, mesh="pipe=3", virtual_stages=1, stages="2,2,2", schedule="gpipe")
    given = frozenset({"mesh", "virtual_stages", "stages", "schedule"})
    assert folder.merge(tmp_path, asked, stored, given) == asked
    same = folder.merge(tmp_path, dataclasses.replace(stored, steps=400), stored, frozenset({"steps"}))
    assert (same.schedule, same.virtual_stages, same.stages) == ("interleaved", 2, "1,1,1,3")
