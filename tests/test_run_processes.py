"""Runs as processes: killed, told to end, resumed; first with a bigram table, then with the model itself."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bigram import config, finish, last_arrays, losses, start, wait_for

from jaxgpt.errors import RESUMABLE, UserError
from jaxgpt.training import checkpoint, run

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


def test_killed_three_times_in_the_middle_of_saves_nothing_committed_is_lost(data: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    checkpoints, asked = where / "checkpoints", {"steps": 24, "log_every": 1, "save_every": 2}
    done = 0
    for _ in range(3):
        with start(where, data, **asked, slow_save=0.3) as started:
            while not (max(checkpoint.steps(checkpoints), default=0) > done and [*checkpoints.glob("*.partial")]):
                assert started.poll() is None, started.communicate()[0]
                time.sleep(0.005)
            started.kill()
        assert [*checkpoints.glob("*.partial")]
        done = max(checkpoint.steps(checkpoints))
    assert 6 <= done < 24
    assert f"resumed after step {done}" in finish(start(where, data, **asked))
    run.train(config(data, **asked), tmp_path / "straight")
    assert last_arrays(where) == last_arrays(tmp_path / "straight")
    assert losses(where) == losses(tmp_path / "straight")


def test_a_signal_saves_and_ends_with_a_status_that_says_resumable(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == RESUMABLE
    step = max(checkpoint.steps(tmp_path / "run" / "checkpoints"))
    assert step < 40
    assert f"stopped after step {step}" in said
    assert "Traceback" not in said


def test_a_second_signal_ends_at_once(data: Path, tmp_path: Path) -> None:
    """As Slurm sends them: a warning, and an end when the time is over."""
    where = tmp_path / "run"
    # A step that would take minutes: only the second signal can end it.
    with start(where, data, hang=3, steps=40, log_every=1, save_every=1) as started:
        wait_for(started, where, 2)
        time.sleep(0.3)
        started.send_signal(signal.SIGUSR1)
        assert started.stdout is not None
        while "SIGUSR1" not in (line := started.stdout.readline()):
            assert line, "ended at the first signal"
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=60) == 128 + signal.SIGTERM
        assert "stopped after" not in started.stdout.read()
    assert checkpoint.steps(where / "checkpoints")


# The model itself


def test_gpt_killed_resumes_bit_for_bit_and_on_another_mesh_to_rounding(data: Path, tmp_path: Path) -> None:
    killed, moved, straight = (tmp_path / name for name in ("killed", "moved", "straight"))
    gpt: dict[str, Any] = {"gpt": True, "steps": 5, "log_every": 1, "save_every": 2, "eval_every": 0, "prompt": ""}
    with start(killed, data, **gpt, mesh="fsdp=8", seconds=0.3) as started:
        wait_for(started, killed, 3)
        started.kill()
    shutil.copytree(killed, moved)
    for where, mesh in ((killed, "fsdp=8"), (moved, "pipe=2,tensor=4")):
        assert "resumed after step" in finish(start(where, data, **gpt, mesh=mesh))
    finish(start(straight, data, **gpt, mesh="fsdp=8"))
    assert last_arrays(killed) == last_arrays(straight)
    assert losses(killed) == losses(straight)
    assert last_arrays(moved) != last_arrays(straight)
    assert [x[:2] for x in losses(moved)] == [x[:2] for x in losses(straight)]
    assert np.allclose([x[2] for x in losses(moved)], [x[2] for x in losses(straight)], rtol=1e-5)
