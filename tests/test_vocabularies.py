"""Vocabularies that no mesh divides: lookup, head, loss and gradients on each device's rows against whole ones.

The whole ones have no padding. Padded rows hold numbers here, as if they had been trained: they must count for nothing.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from quickly import unoptimized
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.model.vocabulary import add_lookup_gradient, head_logits, lookup, loss_and_gradients
from jaxgpt.training import parity
from jaxgpt.training.step import on_mesh

pytestmark = pytest.mark.core

BATCH, SEQ, WIDTH = 4, 6, 8
SCALE = np.float32(0.25)


class Ends(NamedTuple):
    """What both ends of the model make of a batch."""

    looked_up: Any
    logits: Any
    loss: Any
    dhidden: Any
    dtable: Any


def ends_on(tensor: int, vocab: int) -> Any:
    """(table, hidden, tokens, targets) -> Ends, compiled for so many tensor devices."""
    p = parity.program(run_config(dataclasses.replace(GPT, vocab=vocab)), f"tensor={tensor}")

    def ends(table: jax.Array, hidden: jax.Array, tokens: jax.Array, targets: jax.Array) -> Ends:
        loss, dhidden, dtable = loss_and_gradients(hidden, table, targets, jax.numpy.float32(SCALE), vocab)
        dtable = add_lookup_gradient(dtable, tokens, dhidden)
        return Ends(lookup(table, tokens), head_logits(hidden, table, vocab), loss, dhidden, dtable)

    whole = PartitionSpec()
    compiled = jax.jit(on_mesh(p.step_of, p.mesh, ends, (whole,) * 4, whole))

    def call(table: np.ndarray, *rest: np.ndarray) -> Ends:
        split = NamedSharding(p.mesh, p.shardings["embedding.token.weight"].spec)
        placed = [jax.device_put(a, NamedSharding(p.mesh, whole)) for a in rest]
        return jax.tree.map(np.asarray, compiled(jax.device_put(table, split), *placed))

    return call


def plain(table: np.ndarray, hidden: np.ndarray, tokens: np.ndarray, targets: np.ndarray, vocab: int) -> Ends:
    """The same in float64, on the rows that are entries of the vocabulary."""
    rows = table[:vocab].astype(np.float64)
    logits = hidden @ rows.T
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    valid = targets >= 0
    picked = np.where(valid, targets, 0)[..., None]
    loss = -np.log(np.take_along_axis(shares, picked, -1)[..., 0])[valid].sum()
    np.put_along_axis(shares, picked, np.take_along_axis(shares, picked, -1) - 1, -1)
    dlogits = shares * valid[..., None] * SCALE
    dhidden = dlogits @ rows
    dtable = np.zeros(table.shape)
    dtable[:vocab] = np.einsum("bsv,bsd->vd", dlogits, hidden)
    np.add.at(dtable, tokens, dhidden)
    return Ends(table[tokens], logits, loss, dhidden, dtable)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [17, 127, 257, 50257])
def test_both_ends_of_the_model(vocab: int, tensor: int) -> None:
    rng = np.random.default_rng(vocab)
    padded = run_config(dataclasses.replace(GPT, vocab=vocab)).model.padded_vocab
    assert padded > vocab
    table = rng.normal(size=(padded, WIDTH)).astype(np.float32)
    table[vocab:] += 5
    hidden = rng.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)
    tokens = rng.integers(0, vocab, (BATCH, SEQ)).astype(np.int32)
    tokens[0, :2] = 0, vocab - 1
    targets = np.where(rng.random((BATCH, SEQ)) < 0.3, -1, np.roll(tokens, -1, 1)).astype(np.int32)
    targets[2] = -1
    ends = ends_on(tensor, vocab)

    found, expected = ends(table, hidden, tokens, targets), plain(table, hidden, tokens, targets, vocab)
    for name, one, other in zip(Ends._fields, expected, found, strict=True):
        within = other[..., :vocab] if name == "logits" else other
        np.testing.assert_allclose(within, one, rtol=1e-5, atol=1e-5 * np.abs(one).max(), err_msg=name)
    assert (found.logits[..., vocab:] < -1e29).all()
    assert not found.dtable[vocab:].any()

    nothing = ends(table, hidden, tokens, np.full_like(targets, -1))
    assert nothing.loss == 0
    assert not nothing.dhidden.any() and not nothing.dtable.any()


@pytest.mark.parametrize(
    ("model", "mesh", "micro_batch"),
    [
        (dataclasses.replace(LLAMA, layers=1, kv_heads=8, tied=False, vocab=17), "tensor=8", 4),
        (dataclasses.replace(GPT, layers=1, vocab=50257), "data=2,tensor=4", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_whole_model(model: Any, mesh: str, micro_batch: int) -> None:
    """The first microbatch has no target at all."""
    config = run_config(model, global_batch=32 if mesh == "tensor=8" else 16, clip=0.2)
    data = batches(config, 2)
    first = parity.program(dataclasses.replace(config, micro_batch=micro_batch), mesh).place(data[0])["targets"][0]
    assert (np.asarray(first) < 0).all()
    with unoptimized():
        one = parity.trace(config, "data=1", data)
        found = parity.trace(dataclasses.replace(config, micro_batch=micro_batch), mesh, data)
    wrong = [d for d in parity.differences(one, found) if not d.holds]
    assert not wrong
    padding = [a[model.vocab :] for n, a in found.params.items() if n in ("embedding.token.weight", "head.weight")]
    assert not any(rows.any() for rows in padding)
