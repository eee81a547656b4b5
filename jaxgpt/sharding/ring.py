"""Context parallelism: the sequence split over a mesh axis, causal work in balance, attention round a ring.

The sequence is cut into 2n chunks for n devices; device i holds chunks i and 2n-1-i, one early and one late, so that
every device has the same number of (query, key) pairs (the "zigzag" order). Keys and values pass from device to device
(ring attention, arXiv 2310.01889), and the parts of the softmax are merged by their log-sum-exp. Of another device's
keys, those of an earlier device: all queries see its first chunk and none its second; of a later one: only the second
chunk of queries sees them, and both chunks whole. So a step is one unmasked product of half the size either way.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxgpt.sharding.named import sequence_axis


@runtime_checkable
class Kernel(Protocol):
    """Attention to some keys (model.attention.Part)."""

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]: ...

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, sums: jax.Array, dout: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def order(seq: int, parts: int) -> Int[np.ndarray, " seq"]:
    """The position in the text of each place in the split sequence, device after device."""
    chunks = np.arange(seq).reshape(2 * parts, -1)
    return np.concatenate([chunks[[i, 2 * parts - 1 - i]].ravel() for i in range(parts)])


def positions(length: int) -> Int[Array, " length"]:
    """Position in the whole sequence of each of this device's `length` tokens."""
    found = sequence_axis()
    if found is None:
        return jnp.arange(length)
    axis, parts = found
    mine, chunk = lax.axis_index(axis), jnp.arange(length // 2)
    return jnp.concatenate([mine * (length // 2) + chunk, (2 * parts - 1 - mine) * (length // 2) + chunk])


def _ring() -> tuple[str, int, list[tuple[int, int]]]:
    found = sequence_axis()
    assert found is not None
    axis, parts = found
    return axis, parts, [(i, (i + 1) % parts) for i in range(parts)]


def forward(causal: Kernel, full: Kernel, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of this device's queries over the whole sequence before them."""
    axis, parts, shift = _ring()
    half = q.shape[1] // 2
    mine = lax.axis_index(axis)
    out, sums = causal.forward(q, k, v)

    def earlier(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return full.forward(q, k[:, :half], v[:, :half])

    def later(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        part, part_sums = full.forward(q[:, half:], k, v)
        nothing = jnp.full_like(part_sums, -jnp.inf)
        return jnp.concatenate([jnp.zeros_like(part), part], 1), jnp.concatenate([nothing, part_sums], 1)

    def step(carry: Any, turn: jax.Array) -> tuple[Any, None]:
        out, sums, k, v = carry
        k, v = (lax.ppermute(x, axis, shift) for x in (k, v))
        part, part_sums = lax.cond((mine - turn) % parts < mine, earlier, later, k, v)
        return (*_merged(out, sums, part, part_sums), k, v), None

    start = (out.astype(jnp.float32), sums, k, v)
    out32, sums, *_ = lax.scan(step, start, jnp.arange(1, parts))[0]
    return out32.astype(q.dtype), sums


def _merged(out: jax.Array, sums: jax.Array, part: jax.Array, part_sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two parts of a softmax as one."""
    whole = jnp.logaddexp(sums, part_sums)
    share, part_share = jnp.exp(sums - whole)[..., None], jnp.exp(part_sums - whole)[..., None]
    return out * share + part * part_share, whole


def backward(
    causal: Kernel,
    full: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    sums: jax.Array,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients; those of keys and values travel round the ring with them, and one step further, home."""
    axis, parts, shift = _ring()
    half = q.shape[1] // 2
    mine = lax.axis_index(axis)
    late = (q[:, half:], out[:, half:], sums[:, half:], dout[:, half:])

    def earlier(k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        dq, dk, dv = full.backward(q, k[:, :half], v[:, :half], out, sums, dout)
        return dq, *(jnp.concatenate([d, jnp.zeros_like(d)], 1) for d in (dk, dv))

    def later(k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        queries, *rest = late
        dq, dk, dv = full.backward(queries, k, v, *rest)
        return jnp.concatenate([jnp.zeros_like(dq), dq], 1), dk, dv

    def step(carry: Any, turn: jax.Array) -> tuple[Any, None]:
        dq, k, v, dk, dv = carry
        k, v, dk, dv = (lax.ppermute(x, axis, shift) for x in (k, v, dk, dv))
        part_dq, part_dk, part_dv = lax.cond((mine - turn) % parts < mine, earlier, later, k, v)
        return (dq + part_dq, k, v, dk + part_dk, dv + part_dv), None

    dq, dk, dv = (d.astype(jnp.float32) for d in causal.backward(q, k, v, out, sums, dout))
    dq, _, _, dk, dv = lax.scan(step, (dq, k, v, dk, dv), jnp.arange(1, parts))[0]
    dk, dv = (lax.ppermute(d, axis, shift) for d in (dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
