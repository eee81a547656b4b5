"""A stage: its blocks run forward in one scan, and backward in another that goes the other way.

What lies between the two is explicit. The forward returns what each block's derivative keeps, beside the block's input;
the backward takes it back, together with weights that are gathered again rather than held. So a schedule can put any
other work between them, recomputation is whatever the block's policy says, and gradients are added to the accumulated
ones layer by layer, without a second copy of the stage's gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
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


class Place(NamedTuple):
    """A microbatch's place in a ring, whose arrays are [places, rows, ...] each. Writing to it makes no copy where the
    old ring is not read again, inside of conditionals and loops too."""

    ring: Any
    number: jax.Array

    def row(self, row: jax.Array) -> Any:
        """What lies there of one row."""
        return jax.tree.map(lambda a: lax.squeeze(lax.dynamic_slice(a, *self._at(a, row)), (0, 1)), self.ring)

    def put(self, row: jax.Array, value: Any) -> "Place":
        """The place with one row written."""

        def written(a: jax.Array, v: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(a, lax.expand_dims(v, (0, 1)), self._at(a, row)[0])

        return self._replace(ring=jax.tree.map(written, self.ring, value))

    def _at(self, a: jax.Array, row: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[int, ...]]:
        zero = jnp.zeros_like(row)
        return (self.number.astype(row.dtype), row, *(zero,) * (a.ndim - 2)), (1, 1, *a.shape[2:])


class Rows(NamedTuple):
    """The rows of a stage's arrays that hold a part of the model."""

    numbers: jax.Array
    layers: jax.Array
    """Logical layer of each; below 0 for an empty one."""


Arguments = tuple[Weights, Kept, jax.Array, Any]
"""What a block's backward is made from: gathered weights, what was kept, logical layer, context."""
Each = tuple[jax.Array, jax.Array, jax.Array, Any]
"""Of one row: its number, its place among the part's rows, its logical layer, and what was stacked for it."""


class Stage(NamedTuple):
    """The blocks of a stage. dims: named dimensions of one block's weights; used, accumulated: the axes over which
    these and their accumulated gradients lie split.

    Weights and gradients are those of all the stage's rows; rows says which of them a part has. What lies between
    forward and backward is stacked over the part's rows, or lies in a Place.
    """

    block: Block
    dims: dict[str, tuple[str, ...]]
    used: tuple[str, ...]
    accumulated: tuple[str, ...]
    full: bool = True
    """Whether every row holds a layer; where not, the empty ones do nothing."""
    unroll: bool = False
    """Whether the scans are written out: what lies between forward and backward is then not copied into stacks."""

    def _gathered(self, weights: Weights, row: jax.Array) -> Weights:
        """A row's weights whole, and typed fp32 so that their gradients are; products round them to the type they came
        in."""
        mine = _of_row(weights, row)
        with jax.named_scope("gather"):
            whole = {name: gather(w, self.dims[name], self.used) for name, w in mine.items()}
        return {name: w.astype(jnp.float32) for name, w in whole.items()}

    def apply(self, weights: Weights, x: jax.Array, rows: Rows, context: Any) -> jax.Array:
        """Forward alone."""

        def step(x: jax.Array, each: Each) -> tuple[jax.Array, None]:
            number, _, layer, _ = each

            def run() -> jax.Array:
                return self.block(self._gathered(weights, number), x, layer, context)

            return self._if_held(layer, run, lambda: x), None

        return self._scan(step, x, rows, None)[0]

    def _scan(
        self, step: Callable[[Any, Each], Any], start: Any, rows: Rows, stacked: Any, reverse: bool = False
    ) -> tuple[Any, Any]:
        count = jnp.arange(len(rows.numbers), dtype=rows.numbers.dtype)
        each = (rows.numbers, count, rows.layers, stacked)
        found: tuple[Any, Any] = lax.scan(step, start, each, reverse=reverse, unroll=self.unroll)
        return found

    def _if_held(self, layer: jax.Array, run: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """run() for a row that holds a layer, else otherwise()."""
        return run() if self.full else lax.cond(layer >= 0, run, otherwise)

    def forward(
        self, weights: Weights, x: jax.Array, rows: Rows, context: Any, into: Place | None = None
    ) -> tuple[jax.Array, Kept | Place]:
        """Forward, and what the backward needs: stacked, or written into the place."""

        def step(carry: tuple[jax.Array, Place | None], each: Each) -> tuple[Any, Kept | None]:
            (x, into), (number, count, layer, _) = carry, each

            def run() -> tuple[jax.Array, list[jax.Array]]:
                derivative: Any
                y, derivative = jax.vjp(self.block, self._gathered(weights, number), x, layer, context)
                return y, [varying(r, x) for r in _distinct(derivative.opaque_residuals)[0]]

            def pass_by() -> tuple[jax.Array, list[jax.Array]]:
                return x, [zeros_like(r, x) for r in jax.eval_shape(run)[1]]

            y, inside = self._if_held(layer, run, pass_by)
            kept = Kept(x, inside)
            return ((y, None), kept) if into is None else ((y, into.put(count, kept)), None)

        (y, into), kept = self._scan(step, (x, into), rows, None)
        return y, kept if into is None else into

    def backward(
        self, weights: Weights, kept: Kept | Place, dy: jax.Array, rows: Rows, context: Any, gradients: Weights
    ) -> tuple[jax.Array, Weights]:
        """The gradient towards the stage's input, and gradients with this microbatch's added, fp32 and split alike."""

        # written out, a scan's stack is made once, and one that is carried would be read and written row by row
        stacks = self.unroll and not isinstance(kept, Place)
        stacked = (_stacked(kept), gradients if stacks else None)

        def step(carry: tuple[jax.Array, Weights | None], each: Each) -> tuple[Any, Weights | None]:
            (dy, whole), (number, count, layer, (kept_of_row, of_row)) = carry, each

            def run() -> tuple[jax.Array, Weights]:
                arguments = self._gathered(weights, number), _at(kept, count, kept_of_row), layer, context
                dweights, dx = self._derivative(*arguments, dy)
                summed = self._summed(dweights)
                if whole is None:
                    return dx, {n: of_row[n] + g for n, g in summed.items()}
                return dx, _added(whole, number, summed)

            dx, added = self._if_held(layer, run, lambda: (dy, of_row if whole is None else whole))
            return ((dx, None), added) if whole is None else ((dx, added), None)

        start = (dy, None if stacks else gradients)
        (dx, whole), stack = self._scan(step, start, rows, stacked, reverse=True)
        return dx, stack if whole is None else whole

    def to_input(
        self, weights: Weights, kept: Place, dy: jax.Array, rows: Rows, context: Any, into: Place | None = None
    ) -> tuple[jax.Array, Any]:
        """The first part of backward: the gradient towards the stage's input, and what to_weights needs of it, stacked
        or written into the place."""

        def step(carry: tuple[jax.Array, Place | None], each: Each) -> tuple[Any, list[jax.Array] | None]:
            (dy, into), (number, count, layer, _) = carry, each

            def run() -> tuple[jax.Array, list[jax.Array]]:
                arguments = self._gathered(weights, number), kept.row(count), layer, context
                dx, between = self._split(arguments, dy).to_input(arguments, dy)
                return dx, [varying(b, dy) for b in between]

            def pass_by() -> tuple[jax.Array, list[jax.Array]]:
                return dy, [zeros_like(b, dy) for b in jax.eval_shape(run)[1]]

            dx, between = self._if_held(layer, run, pass_by)
            return ((dx, None), between) if into is None else ((dx, into.put(count, between)), None)

        (dx, into), between = self._scan(step, (dy, into), rows, None, reverse=True)
        return dx, between if into is None else into

    def to_weights(
        self, weights: Weights, kept: Place, between: Place, rows: Rows, context: Any, gradients: Weights
    ) -> Weights:
        """The second part of backward: gradients with this microbatch's added."""

        def step(gradients: Weights, each: Each) -> tuple[Weights, None]:
            number, count, layer, _ = each

            def run() -> Weights:
                of_row = kept.row(count)
                arguments = self._gathered(weights, number), of_row, layer, context
                dweights = self._split(arguments, of_row.inputs).to_weights(arguments, between.row(count))
                return _added(gradients, number, self._summed(dweights))

            return self._if_held(layer, run, lambda: gradients), None

        return self._scan(step, gradients, rows, None)[0]

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

    def _summed(self, dweights: Weights) -> Weights:
        with jax.named_scope("reduce"):
            return {n: scatter_sum(g, self.dims[n], self.accumulated) for n, g in dweights.items()}


def _added(gradients: Weights, row: jax.Array, more: Weights) -> Weights:
    """Gradients with more added to one row."""
    before = _of_row(gradients, row)
    return {n: lax.dynamic_update_index_in_dim(gradients[n], before[n] + g, row, 0) for n, g in more.items()}


def _of_row(arrays: Weights, row: jax.Array) -> Weights:
    return {n: lax.dynamic_index_in_dim(a, row, keepdims=False) for n, a in arrays.items()}


def _stacked(kept: Kept | Place) -> Kept | None:
    return None if isinstance(kept, Place) else kept


def _at(kept: Kept | Place, count: jax.Array, stacked: Any) -> Any:
    """What was kept of one row: read from its place, or what the scan hands over."""
    return kept.row(count) if isinstance(kept, Place) else stacked


def _distinct(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[int]]:
    """The different arrays of a list, and for each of its entries which of them it is: nothing is kept twice."""
    different = list({id(a): a for a in arrays}.values())
    index = {id(a): i for i, a in enumerate(different)}
    return different, [index[id(a)] for a in arrays]
