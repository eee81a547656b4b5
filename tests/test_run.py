"""Runs: resumed bit for bit after any end, refused in one line, nothing of the user's lost or overwritten."""

import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import Bigram, Tree, config, last_arrays, losses, snapshot, text

from jaxgpt.config_file import to_json
from jaxgpt.data import training_batch
from jaxgpt.errors import RESUMABLE, UserError
from jaxgpt.training import checkpoint, curve, folder, metrics, opened, run, watchdog

pytest_plugins = ["run_fixtures"]


def stop_after(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends the process a signal once, when the step has been dispatched."""
    real, sent = Bigram.step, []

    def watched(self: Bigram, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        result = real(self, state, batch)
        if int(result[0]["step"]) == step and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        return result

    monkeypatch.setattr(Bigram, "step", watched)


def test_the_first_step_may_compile_as_long_as_it_needs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = Bigram.step, []
    seen: list[tuple[str, float | None]] = []

    def watched(self: Bigram, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        seen.append(dogs[-1].limit())
        return real(self, state, batch)

    dogs: list[watchdog.Watchdog] = []
    monkeypatch.setattr(watchdog.Watchdog, "__enter__", lambda self: dogs.append(self) or self)
    monkeypatch.setattr(watchdog.Watchdog, "__exit__", lambda self, *error: done.append(error))
    monkeypatch.setattr(Bigram, "step", watched)
    run.train(config(data), tmp_path / "run")
    assert seen[0] == ("compile", None)
    assert {name for name, _ in seen[1:]} == {"step"}


def test_a_run_leaves_all_that_it_promises(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "deep" / "run"
    result = run.train(config(data), where)
    assert (result.run, result.step, result.status) == (where, 12, 0)
    assert {e.name for e in where.iterdir()} == {
        *(
            ".lock",
            "config.json",
            "data.json",
            "samples.json",
            "tokenizer",
            "checkpoints",
            "metrics.jsonl",
            "tensorboard",
            "loss.png",
            "sample.txt",
        )
    }
    assert checkpoint.steps(where / "checkpoints") == [5, 10, 12]
    records = metrics.read(where)
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 4, 6, 8, 10, 12]
    assert [(r["step"], r["complete"]) for r in records if r["kind"] == "validation"] == [
        *((0, False), (4, False), (8, False), (12, False), (12, True))
    ]
    assert {"loss", "grad_norm", "lr", "tokens", "milliseconds", "tokens_per_second"} <= records[1].keys()
    assert result.validation is not None
    assert result.validation.loss < records[0]["loss"] - 1
    sample = (where / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert len(sample) == 4 + run.SAMPLE_TOKENS
    said = capsys.readouterr().out
    assert "sample, in" in said
    for fact in ("parameters", "layouts", "a step", "mesh", "memory a device", "MFU is left out", "loss curve"):
        assert fact in said


@pytest.mark.parametrize(("step", "number"), [(3, signal.SIGINT), (4, signal.SIGTERM), (5, signal.SIGUSR1)])
def test_a_signal_saves_and_the_same_call_goes_on_bit_for_bit(
    step: int,
    number: signal.Signals,
    data: Path,
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where, before = tmp_path / "run", signal.getsignal(number)
    with monkeypatch.context() as patch:
        stop_after(step, number, patch)
        result = run.train(config(data), where)
    assert (result.signal, result.step, result.validation) == (number, step, None)
    assert result.status == RESUMABLE
    assert checkpoint.steps(where / "checkpoints") == [step]
    assert signal.getsignal(number) is before
    said = capsys.readouterr().out
    assert f"jaxgpt train --run {where}" in said
    assert number.name in said
    assert run.train(config(data), where).step == 12
    assert last_arrays(where) == last_arrays(straight)
    assert losses(where) == losses(straight)
    assert signal.getsignal(number) is before


def test_resuming_on_another_mesh_gives_the_same_losses(data: Path, straight: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    run.train(config(data, mesh="fsdp=4", steps=5, eval_every=0), where)
    run.train(config(data, mesh="fsdp=2,tensor=2", eval_every=0), where)
    ours = [x for x in losses(where) if x[0] == "train" and x[1] > 5]
    theirs = [x for x in losses(straight) if x[0] == "train" and x[1] > 5]
    assert [x[:2] for x in ours] == [x[:2] for x in theirs]
    assert np.allclose([x[2] for x in ours], [x[2] for x in theirs], rtol=1e-5)


def test_a_finished_run_says_so_and_changes_nothing(
    data: Path, straight: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(straight)
    monkeypatch.setattr(Bigram, "step", Mock(side_effect=AssertionError))
    capsys.readouterr()
    result = run.train(config(data), straight)
    assert result.step == 12
    assert result.status == 0
    assert result.validation is not None
    assert result.validation.loss == metrics.read(straight)[-1]["loss"]
    assert "last step 12" in capsys.readouterr().out
    assert snapshot(straight) == before


def test_a_run_cut_off_in_its_last_validation_makes_up_for_it(data: Path, straight: Path) -> None:
    before = losses(straight)
    lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    (straight / "metrics.jsonl").write_text("".join(lines[:-1]))
    result = run.train(config(data), straight)
    assert result.validation is not None
    assert losses(straight) == before


def damage(of: Path, step: int) -> None:
    file = next((checkpoint.path(of / "checkpoints", step) / "arrays" / "mu").rglob("c/*/*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_named_kept_and_the_one_before_it_taken(
    data: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, recorded = last_arrays(straight), losses(straight)
    (straight / "metrics.jsonl").write_text("".join((straight / "metrics.jsonl").read_text().splitlines(True)[:-1]))
    damage(straight, 12)
    damage(straight, 10)
    run.train(config(data), straight)
    said = capsys.readouterr().out
    assert "step 12 is damaged" in said
    assert "step 10 is damaged" in said
    assert "mu/table" in said
    assert "resumed after step 5" in said
    names = {e.name for e in (straight / "checkpoints").iterdir()}
    assert names == {f"step-{n}" for n in ("00000005", "00000010", "00000012", "00000010.damaged", "00000012.damaged")}
    assert last_arrays(straight) == expected
    assert losses(straight) == recorded


def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew(data: Path, straight: Path) -> None:
    for step in (5, 10, 12):
        damage(straight, step)
    before = snapshot(straight)
    with pytest.raises(UserError, match="no checkpoint is whole"):
        run.train(config(data, steps=20), straight)
    after = snapshot(straight)
    assert {n: b for n, b in after.items() if n != "config.json"} == {
        n: b for n, b in before.items() if n != "config.json"
    }


def test_what_a_dead_run_left_half_written_is_ignored_and_removed(data: Path, straight: Path) -> None:
    checkpoints = straight / "checkpoints"
    shutil.copytree(checkpoints / "step-00000010", checkpoints / "step-00000013.partial")
    with (straight / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 13, "lo')
    run.train(config(data, steps=13), straight)
    assert checkpoint.steps(checkpoints) == [10, 12, 13]
    assert not list(checkpoints.glob("*.partial"))
    assert losses(straight)[-1][:2] == ("validation", 13)


def test_metrics_are_read_a_step_late_and_at_log_steps_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    real_step, real_get, dispatched = Bigram.step, jax.device_get, [0]

    def step(self: Bigram, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        dispatched[0] += 1
        events.append(("dispatch", dispatched[0]))
        return real_step(self, state, batch)

    def get(x: Any) -> Any:
        if isinstance(x, dict) and "grad_norm" in x:
            events.append(("read", dispatched[0]))
        return real_get(x)

    monkeypatch.setattr(Bigram, "step", step)
    monkeypatch.setattr(jax, "device_get", get)
    run.train(config(data, steps=9, log_every=3, eval_every=0, save_every=0), tmp_path / "run")
    # Those of steps 1, 3 and 6 when the next one has been dispatched; the last one's at the end.
    assert [n for kind, n in events if kind == "read"] == [2, 4, 7, 9]
    assert [n for kind, n in events if kind == "dispatch"] == list(range(1, 10))


def test_each_step_sees_its_own_samples(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], Bigram.place

    def place(self: Bigram, batch: dict[str, np.ndarray]) -> Tree:
        seen.append({n: a.copy() for n, a in batch.items()})
        return real(self, batch)

    monkeypatch.setattr(Bigram, "place", place)
    run.train(config(data, steps=2, eval_every=0), tmp_path / "run")
    run.train(config(data, steps=4, eval_every=0), tmp_path / "run")
    bytes_ = np.frombuffer(text().encode(), np.uint8)
    store = json.loads((tmp_path / "run" / "data.json").read_text())["store"]["folder"]
    tokens = np.fromfile(Path(store) / "train.bin", "<u2")
    assert np.array_equal(tokens, bytes_[: len(tokens)])
    batches = [b for b in seen if (b["targets"] >= 0).all() and len(b["inputs"]) == 4]
    expected = training_batch(tokens, 8, 0, 0, 16).reshape(4, 4, 9)
    trained = [b for b in batches if any(np.array_equal(b["inputs"], e[:, :-1]) for e in expected)]
    assert len(trained) == 4
    for batch, samples in zip(trained, expected, strict=True):
        assert np.array_equal(batch["inputs"], samples[:, :-1])
        assert np.array_equal(batch["targets"], samples[:, 1:])


def test_chosen_steps_are_traced_and_the_command_that_opens_them_is_said(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    run.train(config(data, steps=6, eval_every=0, profile="3:5"), where)
    assert len(list((where / "profile").rglob("*.xplane.pb"))) == 1
    assert f"xprof --logdir {where / 'profile'}" in capsys.readouterr().out
    run.train(config(data, steps=7, eval_every=0, profile="3:5"), where)
    assert len(list((where / "profile").rglob("*.xplane.pb"))) == 1
    assert "steps 3 to 4" in capsys.readouterr().out


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["checkpoint", "metrics", "config", "samples.json", "curve", "sample.txt"])
def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay(
    what: str, data: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = last_arrays(straight)
    with monkeypatch.context() as patch:
        if what == "checkpoint":
            patch.setattr(checkpoint.Writer, "_commit", full)
        elif what == "metrics":
            patch.setattr(metrics.os, "fsync", full)
        elif what == "config":
            patch.setattr(folder, "to_json", full)
        elif what == "curve":
            patch.setattr(curve.Figure, "savefig", full)
        else:
            real = folder.replace
            patch.setattr(folder, "replace", lambda file, new: full() if file.name == what else real(file, new))
        changed = 8 if what == "samples.json" else 4
        with pytest.raises(UserError, match="No space left") as caught:
            run.train(config(data, steps=14, global_batch=changed), straight)
    assert "\n" not in str(caught.value)
    assert "." not in what or what in str(caught.value)
    if what not in ("curve", "sample.txt"):
        assert last_arrays(straight) == before
    assert run.train(config(data, steps=14), straight).step == 14


@pytest.mark.parametrize("mesh", ["", "data=2", "fsdp=4", "tensor=2"])
def test_evaluation_is_exact_on_every_mesh(mesh: str, data: Path, straight: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("def one(two): return (three) " * 7)
    found = run.evaluate(straight, str(other), mesh)
    target = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    arrays = checkpoint.restore(straight / "checkpoints", 12, {"params/table": target})
    table = np.asarray(arrays["params/table"], np.float64)
    tokens = np.frombuffer(other.read_bytes(), np.uint8)
    logits = table[tokens[:-1]]
    nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), tokens[1:]]
    assert found.tokens == len(tokens) - 1
    assert found.loss == pytest.approx(nats.mean(), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nats.mean()), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / len(tokens), rel=1e-5)


def test_a_ring_is_left_where_a_run_opens_in_a_pipeline(straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = folder.stored_config(straight)
    model = dataclasses.replace(stored.model, layers=2)
    ringed = dataclasses.replace(stored, model=model, context_attention="ring")
    (straight / "config.json").write_text(to_json(ringed))
    program = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(opened, "Program", program)
    with pytest.raises(InterruptedError):
        run.evaluate(straight, mesh="pipe=2,context=2")
    assert program.call_args.args[0].context_attention == "auto"


def test_evaluation_of_a_runs_own_validation_part_is_what_training_ended_with(straight: Path) -> None:
    before = snapshot(straight)
    last = metrics.read(straight)[-1]
    found = run.evaluate(straight)
    assert (found.tokens, found.loss) == (last["tokens"], pytest.approx(last["loss"], rel=1e-6))
    assert found.bits_per_byte == pytest.approx(last["bits_per_byte"], rel=1e-6)
    assert snapshot(straight) == before


def test_evaluation_of_what_is_no_run_is_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        run.evaluate(tmp_path)
    with pytest.raises(UserError, match="is not the folder of a run"):
        run.evaluate(tmp_path / "none")
