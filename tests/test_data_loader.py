"""Batches: every sample once an epoch, every validation token once, fetched ahead without hanging."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxgpt.data import NO_TARGET, Prefetcher, samples_in, training_batch, validation_batches
from jaxgpt.errors import UserError


def tokens(count):
    # Each token tells its own place.
    return np.arange(count, dtype=np.uint16)


# Training


@pytest.mark.parametrize(("count", "samples"), [(9, 1), (16, 1), (24, 2), (80, 9), (87, 9), (88, 10)])
def test_samples_share_a_token_with_their_neighbours(count, samples):
    assert samples_in(tokens(count), 8) == samples
    batch = training_batch(tokens(count), 8, seed=0, first=0, count=samples)
    assert batch.dtype == np.int32
    shift = batch[:, 0].min()
    assert shift < 8
    assert sorted((batch[:, 0] - shift).tolist()) == list(range(0, 8 * samples, 8))
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(9))


def test_an_epoch_predicts_every_token_once_but_a_few_at_the_ends():
    text, shifts = tokens(11 * 16), set()
    for epoch in range(64):
        targets = training_batch(text, 16, seed=4, first=10 * epoch, count=10)[:, 1:]
        shift = targets.min() - 1
        assert sorted(targets.ravel().tolist()) == list(range(shift + 1, shift + 161))
        shifts.add(int(shift))
    assert shifts <= set(range(16))
    assert len(shifts) > 12  # 64 draws of 16


def test_batches_depend_on_positions_alone():
    text = tokens(1000)
    together = training_batch(text, 7, seed=9, first=100, count=120)
    parts = [training_batch(text, 7, seed=9, first=first, count=30) for first in range(100, 220, 30)]
    np.testing.assert_array_equal(np.concatenate(parts), together)
    assert (training_batch(text, 7, seed=10, first=100, count=120) != together).any()


def test_stored_tokens_are_read_as_they_are(tmp_path):
    text = np.random.default_rng(0).integers(0, 2**31 - 1, 500).astype(np.uint32)
    text.tofile(tmp_path / "t.bin")
    stored = np.memmap(tmp_path / "t.bin", np.uint32, "r")
    np.testing.assert_array_equal(training_batch(stored, 8, 1, 0, 90), training_batch(text, 8, 1, 0, 90))


@pytest.mark.parametrize("count", [0, 1, 8])
def test_text_shorter_than_one_sample(count):
    message = f"the text has {count} tokens, fewer than the 9 of one sample"
    with pytest.raises(UserError, match=message):
        samples_in(tokens(count), 8)
    with pytest.raises(UserError, match=message):
        training_batch(tokens(count), 8, 0, 0, 1)


# Validation


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("count", [2, 8, 9, 10, 25, 64, 65, 100])
def test_every_token_but_the_first_is_a_target_once(count, batch):
    seen = []
    for inputs, targets in map(dict.values, validation_batches(tokens(count), 8, batch)):
        assert inputs.shape == targets.shape == (batch, 8)
        assert inputs.dtype == targets.dtype == np.int32
        known = targets != NO_TARGET
        # Tokens tell their places: a target is the one after its input.
        np.testing.assert_array_equal(inputs[known] + 1, targets[known])
        assert (inputs[~known] == 0).all()
        seen += targets[known].tolist()
    assert seen == list(range(1, count))


def test_a_limit_takes_rows_spread_over_the_text():
    text = tokens(801)

    def starts(limit):
        return [row[0] for each in validation_batches(text, 8, 1, limit) for row in each["inputs"].tolist()]

    assert len(starts(None)) == len(starts(800)) == len(starts(10_000)) == 100
    chosen = starts(87)
    assert len(chosen) == 10
    assert np.diff(chosen).tolist() == [80] * 9
    assert starts(87) == chosen
    assert len(set(starts(333))) == 41
    assert len(starts(1)) == 1
    targets = [each["targets"] for each in validation_batches(text, 8, 4, 87)]
    assert [(rows != NO_TARGET).sum() for rows in targets] == [32, 32, 16]


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_predict(count):
    with pytest.raises(UserError, match=f"the text has {count} tokens, and a prediction needs 2"):
        validation_batches(tokens(count), 8, 2)


# Ahead of use


def test_prefetched_in_order():
    with Prefetcher(lambda step: step * step, 3, 50, ahead=4) as squares:
        assert list(squares) == [step * step for step in range(3, 50)]
        assert list(squares) == []
    assert list(Prefetcher(str, 5, 5)) == []


def test_it_runs_so_far_ahead_and_no_further():
    fetched = []
    third = threading.Event()

    def fetch(step):
        fetched.append(step)
        if step == 3:
            third.set()
        return step

    with Prefetcher(fetch, 0, 100, ahead=3) as steps:
        assert next(steps) == 0
        # Steps 1 to 3 are fetched while nobody asks for them.
        assert third.wait(30)
        assert fetched == [0, 1, 2, 3]
    assert fetched == [0, 1, 2, 3]


def test_an_error_reaches_the_consumer_at_its_step():
    def fetch(step):
        if step == 2:
            raise UserError("step 2 is bad")
        return step

    steps = Prefetcher(fetch, 0, 10, ahead=5)
    assert next(steps) == 0
    assert next(steps) == 1
    with pytest.raises(UserError, match="step 2 is bad"):
        next(steps)
    assert list(steps) == []


def test_closing_ends_it_even_while_fetching():
    begun, go_on = threading.Event(), threading.Event()
    fetched = []

    def fetch(step):
        fetched.append(step)
        begun.set()
        assert go_on.wait(30)

    steps = Prefetcher(fetch, 0, 10, ahead=5)
    assert begun.wait(30)
    steps.close()
    steps.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("prefetch"):
            thread.join(30)
    assert list(steps) == []
    assert fetched == [0]


def test_an_error_in_the_consumer_closes_it():
    def consume(steps):
        with steps:
            for step in steps:
                raise KeyError(step)

    steps = Prefetcher(lambda step: step, 0, 10)
    with pytest.raises(KeyError):
        consume(steps)
    assert list(steps) == []


def test_an_interpreter_ends_though_nobody_closed_it():
    program = "from jaxgpt.data import Prefetcher; steps = Prefetcher(bytes, 0, 10**9); next(steps); 1 / 0"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_ahead_is_at_least_one():
    with pytest.raises(ValueError, match="at least 1"):
        Prefetcher(str, 0, 1, ahead=0)


def test_data_needs_no_jax():
    program = "import sys, jaxgpt.data; assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
