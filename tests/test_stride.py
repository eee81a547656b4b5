"""A sliding window: every token is predicted once, with as much before it as the stride allows, on every mesh."""

import math

import numpy as np
import pytest
from foreign import FAMILIES, drawn, program
from quickly import unoptimized

from jaxgpt.data import validation_batches
from jaxgpt.data.megatron import Documents
from jaxgpt.errors import UserError
from jaxgpt.interop.export import export
from jaxgpt.training import run
from jaxgpt.training.evaluation import measure

SEQ, LENGTH = 16, 45
TOKENS = np.random.default_rng(0).integers(0, 127, LENGTH).astype(np.int32)
ONE = Documents(1, np.zeros_like)


@pytest.fixture(autouse=True)
def cheaply():
    with unoptimized():
        yield


def naive(of, params, stride):
    """Sum of the losses by a loop over windows, each token in the first window that reaches it."""
    total, predicted = 0.0, 1
    for begin in range(0, LENGTH, stride):
        window = TOKENS[begin : begin + SEQ]
        inputs = np.zeros((1, SEQ), np.int32)
        inputs[0, : len(window)] = window
        logits = np.asarray(of.logits(params, of.place_tokens(inputs)), np.float64)[0, :, :127]
        for place in range(predicted, min(begin + SEQ + 1, LENGTH)):
            scores = logits[place - 1 - begin]
            total += math.log(np.exp(scores).sum()) - scores[TOKENS[place]]
        predicted = max(predicted, begin + SEQ + 1)
    return total / (LENGTH - 1)


@pytest.fixture(scope="module")
def wanted():
    of = program(FAMILIES["llama"])
    with unoptimized():
        return {stride: naive(of, drawn(of), stride) for stride in (1, 5, SEQ)}


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "pipe=2,context=2"])
def test_a_stride_is_the_loop_over_windows(wanted, mesh):
    of = program(FAMILIES["llama"], mesh, micro_batch=2)
    params = drawn(of)
    for stride, loss in wanted.items():
        found = measure(of, params, [TOKENS], [ONE], size=90, stride=stride)
        assert found.tokens == LENGTH - 1
        assert found.loss == pytest.approx(loss, rel=1e-5)
        assert found.bits_per_byte == pytest.approx(loss * (LENGTH - 1) / math.log(2) / 90, rel=1e-5)
    assert measure(of, params, [TOKENS], [ONE]).loss == pytest.approx(wanted[SEQ], rel=1e-5)


@pytest.mark.parametrize("length", [2, SEQ, SEQ + 1, SEQ + 2, 40, 49])
@pytest.mark.parametrize("stride", [1, 3, 15, 16])
def test_each_token_is_a_target_once_with_enough_before_it(length, stride):
    tokens = np.arange(length, dtype=np.int32)
    seen = []
    for inputs, targets in map(dict.values, validation_batches(tokens, SEQ, 3, stride=stride)):
        for row, wanted in zip(inputs, targets, strict=True):
            for place in np.flatnonzero(wanted >= 0):
                assert wanted[place] == row[place] + 1
                assert place + 1 >= min(SEQ - stride + 1, wanted[place])  # tokens before it
                seen.append(int(wanted[place]))
    assert seen == list(range(1, length))


@pytest.mark.parametrize("stride", [0, 17, -1])
def test_a_stride_that_leaves_out_tokens_is_refused(tmp_path, stride):
    of = program(FAMILIES["gpt2"])
    export(tmp_path / "model", of.config.model, drawn(of), of.in_order, None, {})
    with pytest.raises(UserError, match=rf"--stride {stride}: must be at least 1 and at most 16"):
        run.evaluate(tmp_path / "model", "stdlib", "data=1", stride=stride)
