"""The two ends of the model that are as wide as the vocabulary: lookup, and head with cross-entropy.

Both work on each tensor device's own rows of the table. Logits are never gathered and never whole: they are computed
for a chunk of tokens at a time, and in training a chunk's gradients are made while its logits are at hand.
Letters: B batch, S sequence, D width, V rows of the table (padded vocabulary), N = B * S tokens, C a chunk of them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxgpt.sharding.named import local, part_of, pmax_over, psum_over, relayout, sum_into, varying

HIDDEN = "batch seq embed"
WHOLE = "batch length embed"
TABLE = "vocab embed"
TOKENS = "batch length"
LOGITS = "batch length vocab"

CHUNK_LOGITS = 2**25
"""Most logits held at once on a device: 128 MiB in fp32."""


def _rows(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of each token among this device's rows, and whether it is one of them."""
    index = tokens - part_of("vocab") * table.shape[0]
    return index, (index >= 0) & (index < table.shape[0])


def lookup(table: Float[Array, "V D"], tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of the table; each device looks up what it has, and the sum over `tensor` is the whole."""

    def rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
        index, mine = _rows(table, tokens)
        return sum_into("vocab", jnp.where(mine[..., None], table.at[index].get(mode="clip"), 0), HIDDEN)

    return local(rows, (TABLE, TOKENS), HIDDEN)(table, tokens)


def add_lookup_gradient(
    dtable: Float[Array, "V D"], tokens: Int[Array, "B S"], dx: Float[Array, "B S D"]
) -> Float[Array, "V D"]:
    """dtable with the lookup's gradient added: onto the head's, where the two are tied, so no second table is made."""

    def add(dtable: jax.Array, tokens: jax.Array, dx: jax.Array) -> jax.Array:
        index, mine = _rows(dtable, tokens)
        nowhere = dtable.shape[0]
        return dtable.at[jnp.where(mine, index, nowhere)].add(dx.astype(dtable.dtype), mode="drop")

    return local(add, (TABLE, TOKENS, WHOLE), TABLE)(dtable, tokens, relayout(dx, WHOLE))


def mask_padding(logits: Float[Array, "*batch V"], vocab: int, first: jax.Array | int = 0) -> Float[Array, "*batch V"]:
    """logits with the padded entries of the vocabulary impossible: the one place where they are masked.

    first: number of the first entry that these logits hold.
    """
    entries = logits.shape[-1]
    if isinstance(first, int):  # written over the end alone: no pass over the logits
        padding = entries - min(max(vocab - first, 0), entries)
        impossible = jnp.full((*logits.shape[:-1], padding), -1e30, logits.dtype)
        return lax.dynamic_update_slice_in_dim(logits, impossible, entries - padding, -1)
    return jnp.where(first + jnp.arange(entries) < vocab, logits, -1e30)


def head_logits(hidden: Float[Array, "B S D"], table: Float[Array, "V D"], vocab: int) -> Float[Array, "B S V"]:
    """Logits in fp32, split over `tensor` as the table is, padded entries masked."""

    def product(hidden: jax.Array, table: jax.Array) -> jax.Array:
        if hidden.shape[1] == 1:  # XLA on CPU reads a table faster on a product's left, and few rows are soon turned
            logits = jnp.einsum("VD,BSD->VBS", table, hidden, preferred_element_type=jnp.float32)
            logits = jnp.moveaxis(logits, 0, -1)
        else:
            logits = jnp.einsum("BSD,VD->BSV", hidden, table, preferred_element_type=jnp.float32)
        return mask_padding(logits, vocab, part_of("vocab") * table.shape[0])

    return local(product, (WHOLE, TABLE), LOGITS)(relayout(hidden, WHOLE), table)


def _chunk(tokens: int, rows: int) -> int:
    """Tokens in a chunk: the largest divisor whose logits are few enough to be held."""
    most = max(1, CHUNK_LOGITS // rows)
    return next(c for c in range(min(tokens, most), 0, -1) if tokens % c == 0)


def _cross_entropy(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss of each token [C] (0 where the target is negative), powers of e [C, V] whose share of their sum over the
    vocabulary is the softmax, and that sum [C]."""
    logits = jnp.einsum("CD,VD->CV", hidden, table, preferred_element_type=jnp.float32)
    logits = mask_padding(logits, vocab, part_of("vocab") * table.shape[0])
    index, mine = _rows(table, targets)
    at_target = jnp.take_along_axis(logits, index[:, None], -1, mode="clip")[:, 0]
    highest = pmax_over("vocab", jnp.max(logits, -1))
    powers = jnp.exp(logits - highest[:, None])
    # one sum of both: it takes one message, and leaves no collective that the backward need not wait for
    total, at_target = psum_over("vocab", jnp.stack([jnp.sum(powers, -1), jnp.where(mine, at_target, 0.0)]))
    loss = jnp.where(targets >= 0, highest + jnp.log(total) - at_target, 0.0)
    return loss, powers, total


def loss_sum(
    hidden: Float[Array, "B S D"], table: Float[Array, "V D"], targets: Int[Array, "B S"], vocab: int
) -> Float[Array, ""]:
    """Sum of the cross-entropy in nats over targets that are not negative."""

    def total(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
        def step(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + jnp.sum(_cross_entropy(chunk[0], table, chunk[1], vocab)[0]), None

        return lax.scan(step, varying(jnp.zeros(()), hidden, targets), _chunks(hidden, table, targets))[0]

    return local(total, (WHOLE, TABLE, TOKENS), "")(relayout(hidden, WHOLE), table, targets)


def _chunks(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    size = _chunk(targets.size, table.shape[0])
    return hidden.reshape(-1, size, hidden.shape[-1]), targets.reshape(-1, size)


def loss_and_gradients(
    hidden: Float[Array, "B S D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    scale: Float[Array, ""],
    vocab: int,
) -> tuple[Float[Array, ""], Float[Array, "B S D"], Float[Array, "V D"]]:
    """loss_sum, and the gradients of scale * loss_sum: towards hidden in its type, towards the table in fp32."""
    run = local(partial(_loss_and_gradients, vocab=vocab), (WHOLE, TABLE, TOKENS, ""), ("", HIDDEN, TABLE))
    return run(relayout(hidden, WHOLE), table, targets, scale)


def _loss_and_gradients(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, scale: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def step(
        carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        total, dtable = carry
        h, t = chunk
        loss, powers, sums = _cross_entropy(h, table, t, vocab)
        # sums * (softmax - target): what all of a row has in common is left to the narrow sides of the products
        is_target = jnp.arange(table.shape[0]) == _rows(table, t)[0][:, None]
        dlogits = jnp.where(is_target, powers - sums[:, None], powers).astype(table.dtype)
        share = (jnp.where(t >= 0, scale, 0.0) / sums)[:, None]
        dh = (jnp.einsum("CV,VD->CD", dlogits, table, preferred_element_type=jnp.float32) * share).astype(h.dtype)
        weighted = (h * share).astype(h.dtype)
        dtable = dtable + jnp.einsum("CV,CD->VD", dlogits, weighted, preferred_element_type=jnp.float32)
        return (total + jnp.sum(loss), dtable), dh

    zeros = varying(jnp.zeros(table.shape, jnp.float32), hidden, table, targets)
    start = (varying(jnp.zeros(()), hidden, targets), zeros)
    (total, dtable), dh = lax.scan(step, start, _chunks(hidden, table, targets))
    return total, sum_into("vocab", dh.reshape(hidden.shape), HIDDEN), dtable
