"""A stage's share of the blocks, and the way of activations through all parts when nothing is trained."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.pipeline.operations import Number
from jaxgpt.pipeline.placement import Placement
from jaxgpt.pipeline.stage import Rows
from jaxgpt.sharding.named import nested, varying

PIPE = "pipe"
STREAM = "batch seq embed"


def here(stages: int) -> Number:
    """This device's stage."""
    return 0 if stages == 1 else lax.axis_index(PIPE)


def rows_of(placement: Placement, chunk: Number) -> Rows:
    """The rows of a chunk among this stage's blocks."""
    first = jnp.asarray(chunk * placement.longest, jnp.int32)
    layers = jnp.asarray(placement.rows)[here(placement.stages)][chunk]
    return Rows(first + jnp.arange(placement.longest, dtype=jnp.int32), layers)


def only(placement: Placement, stage: int, x: jax.Array) -> jax.Array:
    """x as one stage has it, zero on the others."""
    return x if placement.stages == 1 else jnp.where(here(placement.stages) == stage, x, jnp.zeros_like(x))


def from_stage(placement: Placement, stage: int, x: jax.Array) -> jax.Array:
    """x as one stage has it, on all stages, and typed as the same on all: one all-reduce over `pipe`."""
    return x if placement.stages == 1 else lax.psum(only(placement, stage, x), PIPE)


def sent(x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """x from stage to stage as the pairs say; zero where nothing comes."""
    return nested(lambda a: lax.ppermute(a, PIPE, pairs), (STREAM,), STREAM)(x)


def through(placement: Placement, apply: Callable[[Number, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """x through all parts, one after another, each on its stage; the result on all stages.

    apply: (chunk, x) -> the chunk's blocks on this stage applied to x.
    """
    stages = placement.stages
    if stages * placement.chunks == 1:
        return apply(0, x)
    x = varying(x, axes=(PIPE,))

    def step(x: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
        y = lax.cond(part % stages == here(placement.stages), lambda: apply(part // stages, x), lambda: x)
        return sent(y, [(s, (s + 1) % stages) for s in range(stages)]) if stages > 1 else y, None

    x = lax.scan(step, x, jnp.arange(len(placement.parts)))[0]
    return from_stage(placement, 0, x)
