"""The collectives of split parameters (FSDP, ZeRO), in a form that leaves a weight's split over `tensor` alone; and the
order of collectives that do not need each other.

Each of the former is a nested shard_map that is manual over `tensor` as well: without it the compiler adds a gather
over `tensor` to each.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.sharding.named import nested

SPLIT = "embed"
"""The dimension over which parameters are split."""


def gather(weight: jax.Array, dims: tuple[str, ...], axes: tuple[str, ...]) -> jax.Array:
    """The whole of a weight whose `embed` dimension lies split over axes: S -> B, an all-gather."""
    if not axes or SPLIT not in dims:
        return weight
    names = " ".join(dims)
    return nested(lambda w: lax.all_gather(w, axes, axis=dims.index(SPLIT), tiled=True), (names,), names)(weight)


def scatter_sum(gradient: jax.Array, dims: tuple[str, ...], axes: tuple[str, ...]) -> jax.Array:
    """The sum over axes of a whole gradient, each device its part of `embed`: P -> S, a reduce-scatter in fp32."""
    gradient = gradient.astype(jnp.float32)
    if not axes or SPLIT not in dims:
        return gradient
    names, dim = " ".join(dims), dims.index(SPLIT)
    return nested(lambda g: lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True), (names,), names)(gradient)


def after(count: jax.Array, x: jax.Array) -> jax.Array:
    """x, which is there only once `count` is: an integer that is never negative, as the compiler does not know.

    XLA on CPU runs a loop's or a conditional's collectives beside those outside of it that need nothing of it, and that
    it needs nothing of. Devices that share a pool of threads can then all wait, some in the one and the rest in the
    other, for ever. So whatever has collectives must need what had some before it (tests/test_order.py). A barrier
    would not do: XLA takes it away before it makes its threads' work.
    """
    return jnp.where(count < 0, jnp.zeros_like(x), x)
