"""Exact attention for CPUs: a few samples at a time, whose scores stay in the cache, in blocks of queries that, where
attention is causal, see their own prefix of keys alone.

Where documents are apart, what lies outside of a query's own is masked like what comes after it: which blocks are
computed stays a matter of shapes. What it keeps is what a fused GPU kernel keeps (arXiv 2205.14135): the output and the
log-sum-exp of each query's scores, from which the backward computes the probabilities again. No array of queries x keys
outlives a block.
Letters: B samples, S queries, U keys (causal: the same), M key-value heads, G query heads of each, T queries of a
block, K head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

CACHED_SCORES = 2**20
"""Scores computed at once, about as many as a core's cache holds."""
QUERIES = 128
"""Queries in a block: the fewer, the less of the upper triangle is computed in vain, and the smaller the products."""


Starts = tuple[jax.Array, ...]
"""Where the document of each query and of each key begins, [B, S] and [B, U]; empty where none is told from another."""


class Block(NamedTuple):
    """Queries first .. last - 1 and the keys begin .. end - 1 that any of them sees."""

    first: int
    last: int
    begin: int
    end: int


def _blocks(queries: int, keys: int, causal: bool, window: int | None) -> list[Block]:
    count = max(1, min(8, queries // QUERIES))
    while queries % count:
        count -= 1
    size = queries // count
    firsts = range(0, queries, size)
    if not causal:
        return [Block(first, first + size, 0, keys) for first in firsts]
    return [Block(f, f + size, 0 if window is None else max(0, f - window + 1), f + size) for f in firsts]


def _group(samples: int, scores: int) -> int:
    """Samples at a time: the largest divisor whose scores stay in the cache."""
    return next(g for g in range(samples, 0, -1) if samples % g == 0 and (g == 1 or g * scores <= CACHED_SCORES))


def _scores(q: jax.Array, k: jax.Array, block: Block, causal: bool, window: int | None, starts: Starts) -> jax.Array:
    """fp32 [B, M, G, T, keys], masked. q is scaled."""
    queries, keys = q[..., block.first : block.last, :], k[..., block.begin : block.end, :]
    scores = jnp.einsum("bmgtk,bmsk->bmgts", queries, keys, preferred_element_type=jnp.float32)
    if starts:
        own, theirs = starts[0][:, block.first : block.last], starts[1][:, block.begin : block.end]
        scores = jnp.where((own[..., None] == theirs[:, None])[:, None, None], scores, -1e30)
    if not causal:
        return scores
    distance = jnp.arange(block.first, block.last)[:, None] - jnp.arange(block.begin, block.end)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return jnp.where(seen, scores, -1e30)


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, S, N, ...] -> [B, M, G, S, ...]."""
    b, s, n = x.shape[:3]
    return jnp.moveaxis(x.reshape(b, s, kv_heads, n // kv_heads, *x.shape[3:]), 1, 3)


def _flat(x: jax.Array) -> jax.Array:
    """[B, M, G, S, ...] -> [B, S, N, ...]."""
    b, m, g, s = x.shape[:4]
    return jnp.moveaxis(x, 3, 1).reshape(b, s, m * g, *x.shape[4:])


def forward(
    q: Float[Array, "B S N K"],
    k: Float[Array, "B U M K"],
    v: Float[Array, "B U M K"],
    causal: bool,
    window: int | None,
    starts: Starts = (),
) -> tuple[Float[Array, "B S N K"], Float[Array, "B S N"]]:
    """Output, and fp32 log-sum-exp of each query's scores. A query that sees none of these keys has a log-sum-exp of
    about -1e30, so that it counts for nothing where parts are merged."""

    def some(_: None, each: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q, k, v = _grouped(each[0], k_heads), *(jnp.moveaxis(x, 1, 2) for x in each[1:3])
        q = q * q.shape[-1] ** -0.5
        outs, sums = [], []
        for block in _blocks(q.shape[-2], k.shape[-2], causal, window):
            scores = _scores(q, k, block, causal, window, each[3:])
            highest = jnp.max(scores, -1, keepdims=True)
            powers = jnp.exp(scores - highest)
            total = jnp.sum(powers, -1, keepdims=True)
            values = v[..., block.begin : block.end, :]
            outs.append((jnp.einsum("bmgts,bmsk->bmgtk", powers.astype(v.dtype), values) / total).astype(v.dtype))
            sums.append((highest + jnp.log(total))[..., 0])
        return None, (_flat(jnp.concatenate(outs, -2)), _flat(jnp.concatenate(sums, -1)))

    k_heads = k.shape[2]
    out, sums = lax.scan(some, None, _in_groups(q, k, v, *starts))[1]
    return out.reshape(q.shape), sums.reshape(q.shape[:3])


def backward(
    q: Float[Array, "B S N K"],
    k: Float[Array, "B U M K"],
    v: Float[Array, "B U M K"],
    out: Float[Array, "B S N K"],
    sums: Float[Array, "B S N"],
    dout: Float[Array, "B S N K"],
    causal: bool,
    window: int | None,
    starts: Starts = (),
) -> tuple[Float[Array, "B S N K"], Float[Array, "B U M K"], Float[Array, "B U M K"]]:
    """Gradients towards q, k and v from what forward returned; or, where these keys are a part of those that out and
    sums speak of, the part's share of them."""
    heads, delta = k.shape[2], jnp.sum(dout.astype(jnp.float32) * out, -1)

    def some(_: None, each: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
        q, delta, sums, dout = (_grouped(x, heads) for x in (each[0], each[3], each[4], each[5]))
        k, v = (jnp.moveaxis(x, 1, 2) for x in each[1:3])
        dq, dk, dv = _backward_of_some(q, k, v, delta, sums, dout, causal, window, each[6:])
        return None, (_flat(dq), jnp.moveaxis(dk, 1, 2), jnp.moveaxis(dv, 1, 2))

    dq, dk, dv = lax.scan(some, None, _in_groups(q, k, v, delta, sums, dout, *starts))[1]
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _in_groups(q: jax.Array, k: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    size = _group(q.shape[0], q.shape[2] * q.shape[1] * k.shape[1])
    return tuple(x.reshape(-1, size, *x.shape[1:]) for x in (q, k, *rest))


def _backward_of_some(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    delta: jax.Array,
    sums: jax.Array,
    dout: jax.Array,
    causal: bool,
    window: int | None,
    starts: Starts,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, M, G, S, K]; dk, dv [B, M, U, K]."""
    scale, keys = q.shape[-1] ** -0.5, k.shape[-2]
    q = q * scale
    # queries last: the products below then read both operands along their rows
    across_q, across_dout = jnp.swapaxes(q, -1, -2), jnp.swapaxes(dout, -1, -2)
    dqs, dk, dv = [], [], []
    for block in _blocks(q.shape[-2], keys, causal, window):
        first, last, begin, end = block
        powers = jnp.exp(_scores(q, k, block, causal, window, starts) - sums[..., first:last, None])
        dprobabilities = jnp.einsum("bmgtk,bmsk->bmgts", dout[..., first:last, :], v[..., begin:end, :])
        dscores = (powers * (dprobabilities - delta[..., first:last, None])).astype(q.dtype)
        dqs.append(jnp.einsum("bmgts,bmsk->bmgtk", dscores, k[..., begin:end, :]))
        place = ((0, 0),) * 3 + ((begin, keys - end),)
        dk.append(jnp.pad(jnp.einsum("bmgkt,bmgts->bmks", across_q[..., first:last], dscores), place))
        seen = powers.astype(q.dtype)
        dv.append(jnp.pad(jnp.einsum("bmgkt,bmgts->bmks", across_dout[..., first:last], seen), place))
    return jnp.concatenate(dqs, -2) * scale, jnp.swapaxes(sum(dk), -1, -2), jnp.swapaxes(sum(dv), -1, -2)
