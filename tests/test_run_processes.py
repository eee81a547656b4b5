"""Runs as processes: killed, told to end, resumed; first with a bigram table, then with the model itself."""

import dataclasses
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bigram import TINY, config, finish, last_arrays, losses, start, wait_for

from jaxgpt.errors import UserError
from jaxgpt.training import checkpoint, run
from jaxgpt.training.program import Program

pytest_plugins = ["run_fixtures"]


@pytest.fixture
def process(data: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run with slow steps, in the middle of them."""
    started = start(tmp_path / "run", data, seconds=0.05, steps=40, log_every=1, save_every=6)
    wait_for(started, tmp_path / "run", 8)
    with started:
        yield started
        started.kill()


def test_killed_then_resumed_is_bit_for_bit_the_run_never_killed(
    process: subprocess.Popen[str], data: Path, tmp_path: Path
) -> None:
    where = tmp_path / "run"
    with pytest.raises(UserError, match=f"in use by another process .*{process.pid}"):
        run.train(config(data), where)
    process.kill()
    process.wait()
    done = max(checkpoint.steps(where / "checkpoints"))
    assert done >= 6
    said = finish(start(where, data, steps=40, log_every=1, save_every=6))
    assert f"resumed after step {done}" in said
    run.train(config(data, steps=40, log_every=1, save_every=6), tmp_path / "straight")
    assert last_arrays(where) == last_arrays(tmp_path / "straight")
    assert losses(where) == losses(tmp_path / "straight")


def test_a_first_signal_saves_and_ends_with_its_status(process: subprocess.Popen[str], tmp_path: Path) -> None:
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    step = max(checkpoint.steps(tmp_path / "run" / "checkpoints"))
    assert step < 40
    assert f"stopped after step {step}" in said
    assert "Traceback" not in said


def test_a_second_signal_ends_at_once(data: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    # A step that would take minutes: only the second signal can end it.
    with start(where, data, hang=3, steps=40, log_every=1, save_every=1) as started:
        wait_for(started, where, 2)
        time.sleep(0.3)
        started.send_signal(signal.SIGINT)
        assert started.stdout is not None
        while "SIGINT" not in (line := started.stdout.readline()):
            assert line, "ended at the first signal"
        started.send_signal(signal.SIGINT)
        assert started.wait(timeout=60) == 128 + signal.SIGINT
        assert "stopped after" not in started.stdout.read()
    assert checkpoint.steps(where / "checkpoints")


# The model itself

GPT: dict[str, Any] = {"mesh": "data=2", "steps": 5, "log_every": 1, "save_every": 2, "eval_every": 0}
GPT |= {"lr": 0.01, "prompt": "", "gpt": True}


def test_gpt_killed_then_resumed_is_bit_for_bit_the_run_never_killed(data: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    with start(where, data, **GPT, seconds=0.3) as started:
        wait_for(started, where, 3)
        started.kill()
    assert "resumed after step" in finish(start(where, data, **GPT))
    finish(start(tmp_path / "straight", data, **GPT))
    assert last_arrays(where) == last_arrays(tmp_path / "straight")
    assert losses(where) == losses(tmp_path / "straight")


def test_gpt_saved_on_fsdp_8_has_the_same_next_losses_on_data_2_tensor_4(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Program", Program)
    model = dataclasses.replace(TINY, heads=4, dropout=0.1)
    one = config(data, model=model, lr=0.01, global_batch=8, mesh="fsdp=8", steps=4, save_every=2, log_every=1)
    one = dataclasses.replace(one, eval_every=0, prompt="")
    run.train(one, tmp_path / "run")
    other = Path(shutil.copytree(tmp_path / "run", tmp_path / "other"))
    shutil.rmtree(checkpoint.path(other / "checkpoints", 4))
    run.train(dataclasses.replace(one, mesh="data=2,tensor=4"), other)
    ours, theirs = losses(tmp_path / "run"), losses(other)
    assert [x[:2] for x in ours] == [x[:2] for x in theirs]
    assert ours[:2] == theirs[:2]
    assert ours[2:] != theirs[2:]
    assert np.allclose([x[2] for x in ours], [x[2] for x in theirs], rtol=1e-5)
