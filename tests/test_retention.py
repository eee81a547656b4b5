"""Which checkpoints stay, and which one a user names."""

from pathlib import Path

import pytest
from saved import mesh, save, state

from jaxgpt.errors import UserError
from jaxgpt.training import checkpoint, retention
from jaxgpt.training.checkpoint import Writer


def only_step() -> dict:
    return {"step": state(mesh())["step"]}


def stay(losses: dict, last: int = 1, every: int = 0) -> dict:
    return retention.kept(losses, last, every)


def test_the_last_stay_the_best_stays_and_so_does_every_kth() -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 4.0}
    assert stay(losses, 2, 30) == {20: ["best"], 30: ["every 30"], 40: ["of the last 2"], 50: ["of the last 2"]}
    assert stay(losses, 1).keys() == {20, 50}
    assert stay(losses, 9).keys() == losses.keys()
    assert stay({}) == {}


def test_without_a_loss_none_is_best_and_of_two_equals_the_later_is() -> None:
    assert retention.best({1: None, 2: None}) is None
    assert retention.best({1: 2.0, 2: 2.0, 3: None}) == 2
    assert stay({1: None, 2: None}).keys() == {2}


def test_a_writer_keeps_them_and_another_one_goes_on(tmp_path: Path) -> None:
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 5.0}
    writer = Writer(tmp_path, keep=1, every=6)
    for step, loss in losses.items():
        writer.save(step, only_step(), {}, {}, loss=loss)
    writer.close()
    assert checkpoint.steps(tmp_path) == [4, 6, 8]
    again = Writer(tmp_path, keep=1, every=6)
    again.save(10, only_step(), {}, {}, loss=1.5)
    again.save(14, only_step(), {}, {}, loss=0.5)
    again.close()
    assert checkpoint.steps(tmp_path) == [6, 14]
    assert retention.losses_in(tmp_path) == {6: 2.0, 14: 0.5}


def test_a_checkpoint_that_the_user_removed_is_not_missed(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2)
    for step in (1, 2, 3):
        writer.save(step, only_step(), {}, {})
        writer.wait()
        if step == 1:
            checkpoint.path(tmp_path, 1).rename(tmp_path / "mine")
    writer.close()
    assert checkpoint.steps(tmp_path) == [2, 3]


def test_one_is_found_by_number_as_the_last_and_as_the_best(tmp_path: Path) -> None:
    for step, loss in ((3, 2.0), (12, 1.0), (20, None)):
        save(tmp_path, step, only_step(), loss=loss)
    assert [retention.find(tmp_path, wanted) for wanted in ("3", "012", "last", "best")] == [3, 12, 20, 12]
    with pytest.raises(UserError, match=r"--step 4: .* has no checkpoint of that step; it has 3, 12, 20"):
        retention.find(tmp_path, "4")
    with pytest.raises(UserError, match="--step first: must be a step, last or best"):
        retention.find(tmp_path, "first")
    with pytest.raises(UserError, match="has no checkpoint"):
        retention.find(tmp_path / "none", "last")


def test_the_best_of_none_that_was_measured_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3, only_step())
    with pytest.raises(UserError, match=r"--step best: no checkpoint .* has a validation loss"):
        retention.find(tmp_path, "best")


def test_of_many_steps_some_are_named(tmp_path: Path) -> None:
    for step in range(1, 30):
        checkpoint.path(tmp_path, step).mkdir()
    with pytest.raises(UserError, match=r"it has 1, 2, 3, 4, 5, 6, 7, \.\.\., 29$"):
        retention.find(tmp_path, "99")
