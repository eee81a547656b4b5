"""Blends: exact at every prefix, the same for ever, and what is wrong with weights."""

import hashlib
import random

import numpy as np
import pytest

from jaxgpt.data import blend
from jaxgpt.data.blend import Part
from jaxgpt.data.mixture import sample_order
from jaxgpt.errors import UserError

LARGE = 10**11


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ("a.txt", [(1, "a.txt")]),
        ("0.7:a.jsonl,0.3:b/", [(7, "a.jsonl"), (3, "b/")]),
        ("70:a, 30:b", [(7, "a"), (3, "b")]),
        ("1:only", [(1, "only")]),
        (".5:a,with,commas,1.25:b:c", [(2, "a,with,commas"), (5, "b:c")]),
        ("1:a/**/*.txt,1:stdlib,2:x.jsonl#content", [(1, "a/**/*.txt"), (1, "stdlib"), (2, "x.jsonl#content")]),
        ("a,0.3:b", [(1, "a,0.3:b")]),
    ],
)
def test_what_data_says(data, parts):
    assert blend.parse(data) == tuple(Part(*part) for part in parts)
    assert blend.is_blend(data) == data[0].isdigit() or data[0] == "."
    if blend.is_blend(data):
        assert blend.parse(blend.spell(blend.parse(data))) == blend.parse(data)


def test_a_file_named_like_a_blend_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1:a,2:b").write_text("x")
    assert blend.parse("1:a,2:b") == (Part(1, "1:a,2:b"),)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("0:a,1:b", "the weight 0 of a must be above 0"),
        ("1:a,2:", "weight 2 has no source"),
        ("1:a,2:a", "a is named twice"),
        ("0.123457:a,0.876543:b", "repeat only after"),
    ],
)
def test_what_is_wrong_with_weights(data, says):
    with pytest.raises(UserError, match=says) as caught:
        blend.parse(data)
    assert str(caught.value).startswith(f"--data {data}: ")


def weights() -> list[tuple[int, ...]]:
    draw = random.Random(0)
    fixed = [(1, 1), (7, 3), (1, 1, 1), (1, 2, 3, 5, 8, 13), (1,) * 12, (97, 1, 1, 1), (50, 30, 20)]
    return fixed + [tuple(draw.randint(1, 60) for _ in range(draw.randint(2, 9))) for _ in range(60)]


@pytest.mark.parametrize("weights", weights())
def test_every_prefix_is_exact_to_less_than_one_sample(weights):
    period = sum(weights)
    source, turn = blend.draw(weights, np.arange(2 * period + 3))
    for k, weight in enumerate(weights):
        counted = np.cumsum(source == k)
        wanted = np.arange(1, len(source) + 1) * weight / period
        assert np.abs(counted - wanted).max() < 1
        # each source's own samples come in order, none left out
        assert turn[source == k].tolist() == list(range(counted[-1]))
    for positions in (0, 1, period - 1, period, 2 * period + 1):
        assert blend.counts(weights, positions) == np.bincount(source[:positions], minlength=len(weights)).tolist()


def test_a_position_far_out_is_that_of_the_sequence():
    source, turn = blend.draw((7, 2, 1), np.array([LARGE + 3]))
    near, early = blend.draw((7, 2, 1), np.array([3]))
    assert source == near
    assert turn == early + LARGE // 10 * (7, 2, 1)[int(near[0])]


@pytest.mark.parametrize("share", [1, 2, 4])
def test_the_order_of_a_blend_never_changes(share):
    """The first 10,000 of three sources, however they are divided among processes: another constant breaks runs."""
    parts = [np.arange(p, 10_000, share) for p in range(share)]
    found = np.empty((2, 10_000), np.int64)
    for part in parts:
        found[:, part] = sample_order((5, 3, 2), (1000, 777, LARGE), 1337, part)
    assert hashlib.sha256(found.astype("<i8").tobytes()).hexdigest() == ORDER
    source, sample = found
    for k, count in ((0, 1000), (1, 777)):
        mine = sample[source == k]
        for epoch in range(len(mine) // count):
            assert sorted(mine[epoch * count :][:count].tolist()) == list(range(count))


ORDER = "054a5c4b6f83ed53e124604ec778f6610d28b4599d28456c503d42e80ca1ff79"
