"""The order of samples: whole permutations, well shuffled, the same for ever."""

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest

from jaxgpt.data import sample_indices

LARGE = 10**11


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 6, 7, 10, 16, 17, 97, 1000, 4096, 4097])
def test_every_epoch_holds_every_sample_once(samples):
    for epoch in (0, 1, 2, 1000):
        assert sorted(sample_indices(7, epoch * samples, samples, samples)) == list(range(samples))


@pytest.mark.parametrize("samples", [5, 333, LARGE])
def test_an_index_depends_on_seed_and_position_alone(samples):
    first = 2 * samples - 50
    together = sample_indices(3, max(first, 0), 100, samples)
    for start, count in ((0, 1), (13, 40), (99, 1), (40, 0)):
        part = sample_indices(3, max(first, 0) + start, count, samples)
        np.testing.assert_array_equal(part, together[start : start + count])


def test_seeds_and_epochs_differ():
    orders = [sample_indices(seed, epoch * 500, 500, 500) for seed in (0, 1, 2, 2**32 - 1) for epoch in (0, 1, 2)]
    for one, other in itertools.combinations(orders, 2):
        # Two unrelated permutations agree in one place on average.
        assert (one == other).sum() < 10


def test_all_orders_of_a_few_samples_are_equally_likely():
    epochs = 12_000
    orders = sample_indices(3, 0, 5 * epochs, 5).reshape(epochs, 5)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == 120
    chi_squared = sum((count - epochs / 120) ** 2 / (epochs / 120) for count in counts.values())
    # 119 degrees of freedom: mean 119, deviation 15.
    assert chi_squared < 119 + 4 * 15


def test_neighbours_do_not_stay_together():
    samples = 10_000
    order = sample_indices(11, 0, samples, samples)
    step = np.diff(order)
    # Any one difference is expected about once: no stride survives.
    assert Counter(step.tolist()).most_common(1)[0][1] < 10
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(samples))[0, 1]) < 0.03
    halves = order.reshape(100, 100) < samples // 2
    # Each hundred draws from both halves, as a fair coin does.
    assert halves.sum(1).min() > 25
    assert halves.sum(1).max() < 75


def test_a_sample_lands_anywhere_over_seeds_and_over_epochs():
    for orders in (
        np.stack([sample_indices(seed, 0, 20, 20) for seed in range(2000)]),
        sample_indices(5, 0, 40_000, 20).reshape(2000, 20),
    ):
        counts = np.stack([np.bincount(orders[:, place], minlength=20) for place in range(20)])
        # 19 x 19 degrees of freedom: mean 361, deviation 27.
        assert ((counts - 100) ** 2 / 100).sum() < 361 + 4 * 27


def test_any_number_of_samples_costs_nothing():
    order = sample_indices(1, 5 * LARGE + 12_345, 5000, LARGE)
    assert order.dtype == np.int64
    assert len(set(order.tolist())) == 5000
    assert order.min() >= 0
    assert order.max() < LARGE
    assert abs(order.mean() / LARGE - 0.5) < 0.02


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (4_099, "b5df377dfbaa3fdf2546777d148d00a4aa5b54d7c8fb09c55004bdac76211d2c"),
        (LARGE, "0435b009a197f451e467b4fed9b024ad7bafc83408d2213dd99b73cc8c41921b"),
    ],
)
def test_the_order_never_changes(samples, expected):
    """A run must see the same samples after any update of jaxgpt: another constant breaks every resumed run."""
    order = sample_indices(1337, 0, 10_000, samples)
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == expected


@pytest.mark.parametrize("arguments", [(-1, 0, 1, 5), (2**64, 0, 1, 5), (0, -1, 1, 5), (0, 0, -1, 5), (0, 0, 1, 0)])
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="no order"):
        sample_indices(*arguments)
