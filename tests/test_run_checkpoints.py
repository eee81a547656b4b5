"""A run's checkpoints: which it keeps, which is opened, what it says where one is damaged or the disk is slow."""

import threading
from pathlib import Path
from typing import Any

import pytest
from bigram import config

from jaxgpt.errors import UserError
from jaxgpt.training import checkpoint, manifest, metrics, run, zarr
from jaxgpt.training.console import Console

pytest_plugins = ["run_fixtures"]


def test_the_best_stays_with_its_loss_and_every_kth(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    where = tmp_path / "run"
    found = iter([9.0, 3.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    real = run.Loop._validate

    def validate(self: Any, complete: bool = False) -> Any:
        figures = real(self, complete)
        if not complete:  # a run that gets worse again
            self._in_passing = self.done, next(found)
        return figures

    monkeypatch.setattr(run.Loop, "_validate", validate)
    run.train(config(data, steps=24, eval_every=4, save_every=4, keep=1, keep_every=12), where)
    kept = {step: manifest.loss(where / "checkpoints", step) for step in checkpoint.steps(where / "checkpoints")}
    assert kept == {8: 1.0, 12: 2.0, 24: 6.0}


def test_a_checkpoint_has_the_loss_on_record_where_there_was_a_validation(straight: Path) -> None:
    measured = {r["step"]: r["loss"] for r in metrics.read(straight) if r["kind"] == "validation" and not r["complete"]}
    assert measured.keys() == {0, 4, 8, 12}
    kept = {s: manifest.loss(straight / "checkpoints", s) for s in checkpoint.steps(straight / "checkpoints")}
    assert kept == {5: None, 10: None, 12: measured[12]}
    said = checkpoint.read_manifest(straight / "checkpoints", 12)
    assert said.meta["samples"] == 12 * 4
    assert said.meta["config"]["steps"] == 12


def test_another_checkpoint_is_opened_by_its_step(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last, fifth, best = (run.evaluate(straight, step=step).loss for step in ("last", "5", "best"))
    assert fifth != last == best  # the only one with a loss of its own
    assert "step 5, on" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--step 6: .* it has 5, 10, 12"):
        run.evaluate(straight, step="6")


def damage(of: Path, step: int) -> Path:
    file = next((checkpoint.path(of / "checkpoints", step) / "arrays" / "params").rglob("c/*/*"))
    file.write_bytes(file.read_bytes()[:-1])
    return file


def test_strict_resumes_nothing_that_is_damaged_and_changes_nothing(data: Path, straight: Path) -> None:
    file = damage(straight, 12)
    before = {entry.name for entry in (straight / "checkpoints").iterdir()}
    with pytest.raises(UserError, match=r"--resume strict: .* step 12 is damaged") as met:
        run.train(config(data, steps=14, resume="strict"), straight)
    assert str(file) in str(met.value)
    assert {entry.name for entry in (straight / "checkpoints").iterdir()} == before
    assert run.train(config(data, steps=14), straight).step == 14


def test_a_damaged_checkpoint_that_was_named_is_refused(straight: Path) -> None:
    damage(straight, 10)
    with pytest.raises(UserError, match="--step 10: the checkpoint of step 10 is damaged"):
        run.evaluate(straight, step="10")
    run.evaluate(straight)


def test_a_save_that_waits_for_the_one_before_says_so(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, real, fallback = threading.Event(), zarr.write, Console.fallback

    def write(*args: Any, **how: Any) -> zarr.Sums:
        assert done.wait(60)  # a disk that takes longer than two steps
        return real(*args, **how)

    def said_so(self: Console, text: str) -> None:
        fallback(self, text)
        if "waits for" in text:
            done.set()

    monkeypatch.setattr(zarr, "write", write)
    monkeypatch.setattr(Console, "fallback", said_so)
    run.train(config(data, steps=6, eval_every=0, save_every=2), tmp_path / "run")
    said = capsys.readouterr().out
    assert "step 4: waits for the checkpoint of step 2, which is still being written" in said
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [2, 4, 6]
