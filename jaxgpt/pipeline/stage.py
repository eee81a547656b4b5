"""A stage: its blocks run forward in one scan, and backward in another that goes the other way.

What lies between the two is explicit. The forward returns what each block's derivative keeps, beside the block's input;
the backward takes it back, together with weights that are gathered again rather than held. So a schedule can put any
other work between them, recomputation is whatever the block's policy says, and gradients are added to the accumulated
ones layer by layer, without a second copy of the stage's gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.sharding.collectives import gather, scatter_sum

Weights = dict[str, jax.Array]
Block = Callable[[Weights, jax.Array, jax.Array, Any], jax.Array]
"""(weights, x, logical layer, context) -> y."""


class Kept(NamedTuple):
    """What a stage's backward needs of its forward, stacked over its blocks."""

    inputs: jax.Array
    inside: list[jax.Array]


class Stage(NamedTuple):
    """The blocks of a stage. dims: named dimensions of one block's weights; used, accumulated: the axes over which
    these and their accumulated gradients lie split."""

    block: Block
    dims: dict[str, tuple[str, ...]]
    used: tuple[str, ...]
    accumulated: tuple[str, ...]
    unroll: bool = False
    """Whether the scans are written out: what lies between forward and backward is then not copied into stacks."""

    def _gathered(self, weights: Weights) -> Weights:
        with jax.named_scope("gather"):
            return {name: gather(w, self.dims[name], self.used) for name, w in weights.items()}

    def apply(self, weights: Weights, x: jax.Array, first: jax.Array, context: Any) -> jax.Array:
        """Forward alone. weights: stacked over the stage's blocks; first: logical index of the first."""

        def step(x: jax.Array, each: tuple[Weights, jax.Array]) -> tuple[jax.Array, None]:
            return self.block(self._gathered(each[0]), x, each[1], context), None

        return lax.scan(step, x, (weights, first + jnp.arange(_blocks(weights))))[0]

    def forward(self, weights: Weights, x: jax.Array, first: jax.Array, context: Any) -> tuple[jax.Array, Kept]:
        """Forward, with what the backward needs."""

        def step(x: jax.Array, each: tuple[Weights, jax.Array]) -> tuple[jax.Array, Kept]:
            derivative: Any
            y, derivative = jax.vjp(self.block, self._gathered(each[0]), x, each[1], context)
            return y, Kept(x, _distinct(derivative.opaque_residuals)[0])

        return lax.scan(step, x, (weights, first + jnp.arange(_blocks(weights))), unroll=self.unroll)

    def backward(
        self, weights: Weights, kept: Kept, dy: jax.Array, first: jax.Array, context: Any, gradients: Weights
    ) -> tuple[jax.Array, Weights]:
        """The gradient towards the stage's input, and gradients with this microbatch's added, fp32 and split alike."""

        def step(dy: jax.Array, each: tuple[Weights, jax.Array, Kept, Weights]) -> tuple[jax.Array, Weights]:
            weights, layer, kept, gradients = each
            derivative: Any  # traced for its structure alone: its forward is dead code
            _, derivative = jax.vjp(self.block, self._gathered(weights), kept.inputs, layer, context)
            _, places = _distinct(derivative.opaque_residuals)
            derivative.opaque_residuals = [kept.inside[place] for place in places]
            dweights, dx, _, _ = derivative(dy)
            with jax.named_scope("reduce"):
                added = {n: gradients[n] + scatter_sum(g, self.dims[n], self.accumulated) for n, g in dweights.items()}
            return dx, added

        layers = first + jnp.arange(_blocks(weights))
        return lax.scan(step, dy, (weights, layers, kept, gradients), reverse=True, unroll=self.unroll)


def _blocks(weights: Weights) -> int:
    return next(iter(weights.values())).shape[0]


def _distinct(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[int]]:
    """The different arrays of a list, and for each of its entries which of them it is: nothing is kept twice."""
    different = list({id(a): a for a in arrays}.values())
    index = {id(a): i for i, a in enumerate(different)}
    return different, [index[id(a)] for a in arrays]
