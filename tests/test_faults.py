"""Runs in which steps go wrong: left out, stopped at or gone back from, exactly, however late the host reads of it."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from bigram import Bigram, Tree, config, last_arrays, losses

from jaxgpt.config import RunConfig
from jaxgpt.data import open_mixture
from jaxgpt.errors import UserError
from jaxgpt.processes import together
from jaxgpt.training import checkpoint, faults, history, loop, metrics, run
from jaxgpt.training.blame import Culprit
from jaxgpt.training.loop import Loop

pytest_plugins = ["run_fixtures"]

Poison = Callable[[Iterable[int]], list[bytes]]


def samples(data: Path, first: int, count: int = 4) -> np.ndarray:
    mixture = open_mixture(str(data), "bytes", 256, 0.05)
    return mixture.batch(8, 0, np.arange(first, first + count))["inputs"]


@pytest.fixture
def poison(data: Path, monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Takes steps of a run that goes straight: their batches have no target from now on, and so 0 / 0 as their loss."""
    real = Bigram.place

    def these(steps: Iterable[int]) -> list[bytes]:
        bad = [samples(data, 4 * (step - 1)).tobytes() for step in steps]

        def place(self: Bigram, batch: dict[str, np.ndarray]) -> Tree:
            if batch["inputs"].tobytes() in bad:
                batch = batch | {"targets": np.full_like(batch["targets"], -1)}
            return real(self, batch)

        monkeypatch.setattr(Bigram, "place", place)
        return bad

    monkeypatch.setattr(loop, "find", lambda *_: Culprit("loss", "the loss", None, 0, (1, 2)))
    return these


def without(batches: Iterable[int], monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    """Runs read as if these steps' batches were not there; from step `after` on."""
    real, kept = Loop._fetch, [n for n in range(100) if n + 1 not in set(batches)]

    def fetch(self: Loop, step: int, whole: bool = False) -> dict[str, np.ndarray]:
        return real(self, kept[step] if step >= after else step)

    monkeypatch.setattr(Loop, "_fetch", fetch)


@pytest.mark.parametrize(
    ("bad", "changes"),
    [
        ([5], {}),  # where a checkpoint is due
        ([3], {"log_every": 100, "eval_every": 0, "save_every": 0}),  # seen at the end alone
        ([1, 7, 8], {"log_every": 3}),
        ([12], {}),
    ],
    ids=str,
)
def test_a_step_left_out_is_as_if_its_batch_had_not_been_there(
    bad: list[int],
    changes: dict[str, int],
    data: Path,
    tmp_path: Path,
    poison: Poison,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    poison(bad)
    where = tmp_path / "run"
    assert run.train(config(data, **changes), where).step == 12
    found = [r for r in metrics.read(where) if r["kind"] == "fault"]
    assert [(r["step"], r["action"], r["positions"]) for r in found] == [
        (step, "skip", [4 * step - 3, 4 * step - 2]) for step in bad
    ]
    said = capsys.readouterr().out
    for step in bad:
        assert f"step {step}: loss or gradient is not finite, first in the loss, microbatch 0, samples 1, 2" in said
        assert json.loads((where / "faults" / f"step-{step}.json").read_text())["samples"] == [1, 2]
    without(bad, monkeypatch)
    other = tmp_path / "without"
    run.train(config(data, **changes, steps=12 - len(bad)), other)
    assert last_arrays(where) == last_arrays(other)
    assert all(np.isfinite(r["loss"]) for r in metrics.read(where) if r["kind"] == "train")


@pytest.mark.parametrize("step", [4, 6])
def test_a_run_resumed_before_or_after_a_bad_step_is_the_one_never_stopped(
    step: int, data: Path, tmp_path: Path, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison([5, 6])
    run.train(config(data), tmp_path / "straight")
    where, real = tmp_path / "run", Loop._fetch
    sent: list[int] = []

    def fetch(self: Loop, at: int, whole: bool = False) -> dict[str, np.ndarray]:
        if at == step and not sent:
            sent.append(at)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return real(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_fetch", fetch)
        stopped = run.train(config(data), where)
    assert stopped.signal == signal.SIGTERM
    assert run.train(config(data), where).step == 12
    assert last_arrays(where) == last_arrays(tmp_path / "straight")
    assert losses(where) == losses(tmp_path / "straight")
    faulty = [[r["step"] for r in metrics.read(of) if r["kind"] == "fault"] for of in (where, tmp_path / "straight")]
    assert faulty == [[5, 6], [5, 6]]


@pytest.mark.parametrize("policy", ["skip:1", "rewind:1"])
def test_a_step_goes_wrong_while_it_is_agreed_where_several_processes_stop(
    policy: str, data: Path, tmp_path: Path, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has heard of a signal goes on as far as one that has not: only what is agreed ends the steps."""
    poison([2])
    asked: list[bool] = []

    class Agreed:
        signal = signal.SIGTERM

        def __init__(self, _: object) -> None: ...

        def ends(self) -> bool:
            asked.append(True)
            return len(asked) > 6

    monkeypatch.setattr(together, "Stop", Agreed)
    stopped = run.train(config(data, non_finite=policy, log_every=1, save_every=0, eval_every=0), tmp_path / "run")
    # Two steps and one begun before the bad one is known; once between; then two more, or two from the start.
    assert (stopped.signal, stopped.step) == (signal.SIGTERM, 4 if policy == "skip:1" else 2)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [stopped.step]


def test_so_many_in_a_row_are_left_out_and_no_more_also_when_resumed(
    data: Path, tmp_path: Path, poison: Poison
) -> None:
    poison([4, 5, 6])
    where = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(UserError, match=r"step 6: .* the checkpoint of step 5 is kept; .*larger N in --non-finite"):
            run.train(config(data, non_finite="skip:2"), where)
        assert checkpoint.steps(where / "checkpoints") == [5]
    assert run.train(config(data, non_finite="skip:3"), where).step == 12
    apart = tmp_path / "apart"
    poison([2, 4, 6, 8])
    assert run.train(config(data, non_finite="skip:1"), apart).step == 12


def test_stop_saves_the_state_before_the_step_and_names_what_was_wrong(
    data: Path, tmp_path: Path, poison: Poison
) -> None:
    poison([4])
    where = tmp_path / "run"
    with pytest.raises(UserError, match=r"step 4: .*first in the loss, .*checkpoint of step 3 is kept") as caught:
        run.train(config(data, non_finite="stop"), where)
    assert "\n" not in str(caught.value)
    assert checkpoint.steps(where / "checkpoints") == [3]
    assert (where / "faults" / "step-4.json").exists()


def test_parameters_that_are_not_finite_take_no_checkpoints_place(
    data: Path, tmp_path: Path, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison([7])
    monkeypatch.setattr(loop, "find", lambda *_: Culprit("parameter", "table", None, 0, (1,)))
    with pytest.raises(UserError, match=r"step 7: .*the checkpoint of step 5 is kept"):
        run.train(config(data, non_finite="stop"), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [5]


def test_a_disk_too_full_to_say_what_was_wrong_is_one_line(
    data: Path, tmp_path: Path, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison([7])
    where = tmp_path / "run"
    run.train(config(data, steps=6), where)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(faults.folder, "replace", full)
        patch.setattr(run.folder, "write", lambda *_: None)
        with pytest.raises(UserError, match=r"run/faults: cannot be written \(No space left"):
            run.train(config(data), where)
    assert run.train(config(data), where).step == 12


def test_rewind_goes_on_from_the_checkpoint_with_the_samples_after_the_step(
    data: Path, tmp_path: Path, poison: Poison, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison([8])
    where, cut = tmp_path / "run", tmp_path / "cut"
    wanted = config(data, non_finite="rewind:1")
    run.train(wanted, where)
    assert "back to step 5; goes on after the 32 samples up to step 8, which are left out" in capsys.readouterr().out
    assert [(p.step, p.sample, p.rewinds) for p in history._read(where)] == [(0, 0, 0), (5, 32, 1)]
    run.train(config(data, non_finite="rewind:1", steps=10), cut)
    run.train(wanted, cut)
    assert last_arrays(cut) == last_arrays(where)
    without([6, 7, 8], monkeypatch)
    run.train(wanted, tmp_path / "without")
    assert last_arrays(where) == last_arrays(tmp_path / "without")
    assert losses(where) == losses(tmp_path / "without")


def test_rewind_before_any_checkpoint_begins_anew_and_no_more_often_than_allowed(
    data: Path, tmp_path: Path, poison: Poison
) -> None:
    poison([2, 5, 8])
    wanted: dict[str, str | int] = {"save_every": 0, "log_every": 1}
    # With the samples after step 2, step 3 is bad; after that, once more.
    with pytest.raises(UserError, match="come back to step 0 2 times"):
        run.train(config(data, non_finite="rewind:2", **wanted), tmp_path / "run")
    poison([2, 5, 8])
    assert run.train(config(data, non_finite="rewind:3", **wanted), tmp_path / "other").step == 12
    assert [p.sample for p in history._read(tmp_path / "other")] == [32]
    written = {f.name for f in (tmp_path / "other" / "faults").iterdir()}
    assert written == {"step-2.json", "step-3.json", "step-3-2.json"}


def spiking(step: int, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a straight run's step, wherever its batch is read, is ten times what it is."""
    real, bad = Bigram.step, samples(data, 4 * (step - 1)).tobytes()

    def higher(self: Bigram, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        state, found = real(self, state, batch)
        factor = 10.0 if np.asarray(batch["inputs"]).tobytes() == bad else 1.0
        return state, found | {"loss": found["loss"] * np.float32(factor)}

    monkeypatch.setattr(Bigram, "step", higher)


def test_a_spike_is_gone_back_from_and_its_samples_left_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spiking(12, data, monkeypatch)
    steady = config(data, steps=14, log_every=1, save_every=10, lr=1.0)
    ignored, wanted = (RunConfig(**{**vars(steady), "spike": factor}) for factor in (0.0, 3.0))
    run.train(ignored, tmp_path / "ignored")
    assert "back to" not in capsys.readouterr().out
    where, cut = tmp_path / "run", tmp_path / "cut"
    run.train(wanted, where)
    said = capsys.readouterr().out
    assert "is over 3 times the median" in said
    assert "back to step 10; goes on after the 48 samples up to step 12" in said
    run.train(RunConfig(**{**vars(wanted), "steps": 13}), cut)
    run.train(wanted, cut)
    assert last_arrays(cut) == last_arrays(where)
    without([11, 12], monkeypatch)
    run.train(wanted, tmp_path / "without")
    assert losses(where) == losses(tmp_path / "without")


def test_spikes_are_held_against_the_median_of_the_last_readings() -> None:
    quiet = faults.Spikes(0.0, [])
    assert [quiet.above(loss) for loss in (1.0, *(1.0,) * 20, 1e9)] == [None] * 22
    found = faults.Spikes(2.0, [{"kind": "train", "step": n, "loss": 3.0} for n in range(faults.FEWEST - 1)])
    assert found.above(100.0) is None  # too few to know
    assert found.above(6.0) is None
    assert found.above(6.1) == 3.0
    assert found.above(6.1) == 3.0  # a spike is no reading
    assert [found.above(5.0) for _ in range(faults.READINGS)] == [None] * faults.READINGS
    assert found.above(9.9) is None
    assert found.above(10.1) == pytest.approx(5.0, abs=5)


@pytest.mark.parametrize("value", ["skip", "skip:0", "skip:x", "stop:1", "rewind:-1", "go", ""])
def test_a_policy_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=f"--non-finite {value}.*: must be skip:N, rewind:N or stop"):
        RunConfig(non_finite=value)


@pytest.mark.parametrize("flag", ["spike", "watchdog"])
@pytest.mark.parametrize("value", [-1.0, 0.5, 1.0, float("inf"), float("nan")])
def test_factors_are_above_one(flag: str, value: float) -> None:
    with pytest.raises(UserError, match=f"--{flag} .*must be above 1 and finite, or 0 for none"):
        RunConfig(**{flag: value})
    assert getattr(RunConfig(**{flag: 0.0}), flag) == 0
