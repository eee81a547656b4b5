"""A stage: its blocks run forward in one scan, and backward in another that goes the other way.

What lies between the two is explicit. The forward returns what each block's derivative keeps, beside the block's input;
the backward takes it back, together with weights that are gathered again rather than held. So a schedule can put any
other work between them, recomputation is whatever the block's policy says, and gradients are added to the accumulated
ones layer by layer, without a second copy of the stage's gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

from jaxgpt.pipeline.split import Split, split
from jaxgpt.sharding.collectives import gather, scatter_sum
from jaxgpt.sharding.named import varying, zeros_like

Weights = dict[str, jax.Array]
T = TypeVar("T")
Block = Callable[[Weights, jax.Array, jax.Array, Any], jax.Array]
"""(weights, x, logical layer, context) -> y."""


class Kept(NamedTuple):
    """What a stage's backward needs of its forward, stacked over its blocks."""

    inputs: jax.Array
    inside: list[jax.Array]


Arguments = tuple[Weights, Kept, jax.Array, Any]
"""What a block's backward is made from: gathered weights, what was kept, logical layer, context."""


class Stage(NamedTuple):
    """The blocks of a stage. dims: named dimensions of one block's weights; used, accumulated: the axes over which
    these and their accumulated gradients lie split."""

    block: Block
    dims: dict[str, tuple[str, ...]]
    used: tuple[str, ...]
    accumulated: tuple[str, ...]
    full: bool = True
    """Whether every row holds a layer; where not, the empty ones, whose number is below 0, do nothing."""
    unroll: bool = False
    """Whether the scans are written out: what lies between forward and backward is then not copied into stacks."""

    def _gathered(self, weights: Weights) -> Weights:
        with jax.named_scope("gather"):
            return {name: gather(w, self.dims[name], self.used) for name, w in weights.items()}

    def apply(self, weights: Weights, x: jax.Array, layers: jax.Array, context: Any) -> jax.Array:
        """Forward alone. weights: stacked over the stage's rows; layers: logical index of each row."""

        def step(x: jax.Array, each: tuple[Weights, jax.Array]) -> tuple[jax.Array, None]:
            weights, layer = each

            def run() -> jax.Array:
                return self.block(self._gathered(weights), x, layer, context)

            return self._if_held(layer, run, lambda: x), None

        return lax.scan(step, x, (weights, layers))[0]

    def _if_held(self, layer: jax.Array, run: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """run() for a row that holds a layer, else otherwise()."""
        return run() if self.full else lax.cond(layer >= 0, run, otherwise)

    def forward(self, weights: Weights, x: jax.Array, layers: jax.Array, context: Any) -> tuple[jax.Array, Kept]:
        """Forward, with what the backward needs."""

        def step(x: jax.Array, each: tuple[Weights, jax.Array]) -> tuple[jax.Array, Kept]:
            weights, layer = each

            def run() -> tuple[jax.Array, list[jax.Array]]:
                derivative: Any
                y, derivative = jax.vjp(self.block, self._gathered(weights), x, layer, context)
                return y, [varying(r, x) for r in _distinct(derivative.opaque_residuals)[0]]

            def pass_by() -> tuple[jax.Array, list[jax.Array]]:
                return x, [zeros_like(r, x) for r in jax.eval_shape(run)[1]]

            y, inside = self._if_held(layer, run, pass_by)
            return y, Kept(x, inside)

        return lax.scan(step, x, (weights, layers), unroll=self.unroll)

    def backward(
        self, weights: Weights, kept: Kept, dy: jax.Array, layers: jax.Array, context: Any, gradients: Weights
    ) -> tuple[jax.Array, Weights]:
        """The gradient towards the stage's input, and gradients with this microbatch's added, fp32 and split alike."""

        def step(dy: jax.Array, each: tuple[Weights, jax.Array, Kept, Weights]) -> tuple[jax.Array, Weights]:
            weights, layer, kept, gradients = each

            def run() -> tuple[jax.Array, Weights]:
                dweights, dx = self._derivative(*self._arguments(weights, kept, layer, context), dy)
                return dx, self._added(gradients, dweights)

            return self._if_held(layer, run, lambda: (dy, gradients))

        return lax.scan(step, dy, (weights, layers, kept, gradients), reverse=True, unroll=self.unroll)

    def to_input(
        self, weights: Weights, kept: Kept, dy: jax.Array, layers: jax.Array, context: Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The first part of backward: the gradient towards the stage's input, and what to_weights needs of it."""

        def step(dy: jax.Array, each: tuple[Weights, jax.Array, Kept]) -> tuple[jax.Array, list[jax.Array]]:
            weights, layer, kept = each

            def run() -> tuple[jax.Array, list[jax.Array]]:
                arguments = self._arguments(weights, kept, layer, context)
                dx, between = self._split(arguments, dy).to_input(arguments, dy)
                return dx, [varying(b, dy) for b in between]

            return self._if_held(layer, run, lambda: (dy, [zeros_like(b, dy) for b in jax.eval_shape(run)[1]]))

        return lax.scan(step, dy, (weights, layers, kept), reverse=True)

    def to_weights(
        self,
        weights: Weights,
        kept: Kept,
        between: list[jax.Array],
        layers: jax.Array,
        context: Any,
        gradients: Weights,
    ) -> Weights:
        """The second part of backward: gradients with this microbatch's added."""
        each_of = (weights, layers, kept, between, gradients)

        def step(_: None, each: tuple[Weights, jax.Array, Kept, list[jax.Array], Weights]) -> tuple[None, Weights]:
            weights, layer, kept, between, gradients = each

            def run() -> Weights:
                arguments = self._arguments(weights, kept, layer, context)
                dweights = self._split(arguments, kept.inputs).to_weights(arguments, between)
                return self._added(gradients, dweights)

            return None, self._if_held(layer, run, lambda: gradients)

        return lax.scan(step, None, each_of)[1]

    def _arguments(self, weights: Weights, kept: Kept, layer: jax.Array, context: Any) -> Arguments:
        return self._gathered(weights), kept, layer, context

    def _derivative(
        self, weights: Weights, kept: Kept, layer: jax.Array, context: Any, dy: jax.Array
    ) -> tuple[Weights, jax.Array]:
        """Gradients of a block's weights and input."""
        derivative: Any  # traced for its structure alone: its forward is dead code
        _, derivative = jax.vjp(self.block, weights, kept.inputs, layer, context)
        _, places = _distinct(derivative.opaque_residuals)
        derivative.opaque_residuals = [kept.inside[place] for place in places]
        dweights, dx, _, _ = derivative(dy)
        return dweights, dx

    def _split(self, arguments: Arguments, dy: jax.Array) -> Split:
        def backward(arguments: Arguments, dy: jax.Array) -> tuple[Weights, jax.Array]:
            return self._derivative(*arguments, dy)

        return split(backward, arguments, dy)

    def _added(self, gradients: Weights, dweights: Weights) -> Weights:
        with jax.named_scope("reduce"):
            summed = {n: scatter_sum(g, self.dims[n], self.accumulated) for n, g in dweights.items()}
            return {n: gradients[n] + g for n, g in summed.items()}


def _distinct(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[int]]:
    """The different arrays of a list, and for each of its entries which of them it is: nothing is kept twice."""
    different = list({id(a): a for a in arrays}.values())
    index = {id(a): i for i, a in enumerate(different)}
    return different, [index[id(a)] for a in arrays]
