"""FSDP's two collectives over `fsdp`, in a form that leaves a weight's split over `tensor` alone.

Each is a nested shard_map that is manual over `tensor` as well: without it the compiler adds a gather over `tensor`
to each.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.sharding.named import nested

FSDP = "fsdp"


def gather(weight: jax.Array, dims: tuple[str, ...], split: bool) -> jax.Array:
    """The whole of a weight whose `embed` dimension lies split over fsdp: S -> B, an all-gather."""
    if not split or "embed" not in dims:
        return weight
    names = " ".join(dims)
    return nested(lambda w: lax.all_gather(w, FSDP, axis=dims.index("embed"), tiled=True), (names,), names)(weight)


def scatter_sum(gradient: jax.Array, dims: tuple[str, ...], split: bool) -> jax.Array:
    """The sum over fsdp of a whole gradient, each device its part of `embed`: P -> S, a reduce-scatter in fp32."""
    gradient = gradient.astype(jnp.float32)
    if not split or "embed" not in dims:
        return gradient
    names = " ".join(dims)
    dim = dims.index("embed")
    return nested(lambda g: lax.psum_scatter(g, FSDP, scatter_dimension=dim, tiled=True), (names,), names)(gradient)
