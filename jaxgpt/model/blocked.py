"""Exact causal attention for CPUs: a few samples at a time, whose scores stay in the cache, in blocks of queries that
see their own prefix of keys alone.

What it keeps is what a fused GPU kernel keeps (arXiv 2205.14135): the output and the log-sum-exp of each query's
scores, from which the backward computes the probabilities again. No array of queries x keys outlives a block.
Letters: B samples, S sequence, M key-value heads, G query heads of each, T queries of a block, K head width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

CACHED_SCORES = 2**19
"""Scores computed at once, about as many as a core's cache holds."""
QUERIES = 128
"""Queries in a block: the fewer, the less of the upper triangle is computed in vain, and the smaller the products."""

Block = tuple[int, int, int]
"""First query, the query after the last, and the first key that any of them sees."""


def _blocks(seq: int, window: int | None) -> list[Block]:
    count = max(1, min(8, seq // QUERIES))
    while seq % count:
        count -= 1
    size = seq // count
    return [(i * size, (i + 1) * size, 0 if window is None else max(0, i * size - window + 1)) for i in range(count)]


def _group(samples: int, scores: int) -> int:
    """Samples at a time: the largest divisor whose scores stay in the cache."""
    return next(g for g in range(samples, 0, -1) if samples % g == 0 and (g == 1 or g * scores <= CACHED_SCORES))


def _scores(q: jax.Array, k: jax.Array, block: Block, window: int | None) -> jax.Array:
    """[B, M, G, T, keys], masked. q is scaled."""
    first, last, reach = block
    scores = jnp.einsum("bmgtk,bmsk->bmgts", q[..., first:last, :], k[..., reach:last, :])
    distance = jnp.arange(first, last)[:, None] - jnp.arange(reach, last)
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
    q: Float[Array, "B S N K"], k: Float[Array, "B S M K"], v: Float[Array, "B S M K"], window: int | None
) -> tuple[Float[Array, "B S N K"], Float[Array, "B S N"]]:
    """Output, and log-sum-exp of each query's scores."""

    def some(_: None, each: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q, k, v = _grouped(each[0], k_heads), *(jnp.moveaxis(x, 1, 2) for x in each[1:])
        q = q * q.shape[-1] ** -0.5
        outs, sums = [], []
        for block in _blocks(q.shape[-2], window):
            scores = _scores(q, k, block, window)
            highest = jnp.max(scores, -1, keepdims=True)
            powers = jnp.exp(scores - highest)
            total = jnp.sum(powers, -1, keepdims=True)
            values = v[..., block[2] : block[1], :]
            outs.append(jnp.einsum("bmgts,bmsk->bmgtk", powers, values) / total)
            sums.append((highest + jnp.log(total))[..., 0])
        return None, (_flat(jnp.concatenate(outs, -2)), _flat(jnp.concatenate(sums, -1)))

    k_heads = k.shape[2]
    out, sums = lax.scan(some, None, _in_groups(q, k, v))[1]
    return out.reshape(q.shape), sums.reshape(q.shape[:3])


def backward(
    q: Float[Array, "B S N K"],
    k: Float[Array, "B S M K"],
    v: Float[Array, "B S M K"],
    out: Float[Array, "B S N K"],
    sums: Float[Array, "B S N"],
    dout: Float[Array, "B S N K"],
    window: int | None,
) -> tuple[Float[Array, "B S N K"], Float[Array, "B S M K"], Float[Array, "B S M K"]]:
    """Gradients towards q, k and v from what forward returned."""
    heads = k.shape[2]

    def some(_: None, each: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
        q, out, sums, dout = (_grouped(x, heads) for x in (each[0], each[3], each[4], each[5]))
        k, v = (jnp.moveaxis(x, 1, 2) for x in each[1:3])
        dq, dk, dv = _backward_of_some(q, k, v, out, sums, dout, window)
        return None, (_flat(dq), jnp.moveaxis(dk, 1, 2), jnp.moveaxis(dv, 1, 2))

    dq, dk, dv = lax.scan(some, None, _in_groups(q, k, v, out, sums, dout))[1]
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _in_groups(q: jax.Array, k: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    size = _group(q.shape[0], q.shape[2] * q.shape[1] * k.shape[1])
    return tuple(x.reshape(-1, size, *x.shape[1:]) for x in (q, k, *rest))


def _backward_of_some(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, sums: jax.Array, dout: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, M, G, S, K]; dk, dv [B, M, S, K]."""
    scale, seq = q.shape[-1] ** -0.5, q.shape[-2]
    q = q * scale
    delta = jnp.sum(dout * out, -1, keepdims=True)
    # queries last: the products below then read both operands along their rows
    across_q, across_dout = jnp.swapaxes(q, -1, -2), jnp.swapaxes(dout, -1, -2)
    dqs, dk, dv = [], [], []
    for first, last, reach in _blocks(seq, window):
        powers = jnp.exp(_scores(q, k, (first, last, reach), window) - sums[..., first:last, None])
        dprobabilities = jnp.einsum("bmgtk,bmsk->bmgts", dout[..., first:last, :], v[..., reach:last, :])
        dscores = powers * (dprobabilities - delta[..., first:last, :])
        dqs.append(jnp.einsum("bmgts,bmsk->bmgtk", dscores, k[..., reach:last, :]))
        place = ((0, 0),) * 3 + ((reach, seq - last),)
        dk.append(jnp.pad(jnp.einsum("bmgkt,bmgts->bmks", across_q[..., first:last], dscores), place))
        dv.append(jnp.pad(jnp.einsum("bmgkt,bmgts->bmks", across_dout[..., first:last], powers), place))
    return jnp.concatenate(dqs, -2) * scale, jnp.swapaxes(sum(dk), -1, -2), jnp.swapaxes(sum(dv), -1, -2)
