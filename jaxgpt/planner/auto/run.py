"""A program run as its solution says, by each device on its own parts: inside of a shard_map over all axes.

Every collective is one of boxing's, or belongs to a rule (a maximum over parts), so that the compiled program moves
what was predicted and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.lax import GatherScatterMode

from jaxgpt.planner.auto.program import Atom, Loop, Node, Program, Value
from jaxgpt.planner.auto.rules import indexed
from jaxgpt.planner.auto.solve import Choice, Solution
from jaxgpt.sharding.boxing import path, take
from jaxgpt.sharding.sbp import Signature, splits

Sizes = Mapping[str, int]
Steps = Sequence[Node | Loop]


def local(program: Program, solution: Solution, sizes: Sizes) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of each device's parts of arguments and constants, which returns its parts of the results."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        scope = _Scope(solution, sizes)
        for node, array in zip(program.arguments, arrays, strict=True):
            scope.keep(node, (array,))
        scope.run(program.steps)
        return tuple(scope.read(node, 0) for node in program.results)

    return run


class _Scope:
    """The arrays of a program or of a loop's body, in every signature in which they are at hand."""

    def __init__(self, solution: Solution, sizes: Sizes) -> None:
        self.solution, self.sizes = solution, sizes
        self.arrays: dict[Value, dict[Signature, jax.Array]] = {}

    def keep(self, node: Node, arrays: Sequence[jax.Array], first: int = 0) -> None:
        """What a node makes, from its output number `first` on."""
        signatures = self.solution.chosen[node].outputs[first:]
        for value, signature, array in zip(node.outputs[first:], signatures, arrays, strict=False):
            self.arrays[value] = {signature: array}

    def read(self, node: Node, position: int) -> jax.Array:
        """An input of a node, in the signature that it has chosen."""
        return self.get(node.inputs[position], self.solution.chosen[node].inputs[position])

    def get(self, atom: Atom, target: Signature) -> jax.Array:
        """An array in a signature: as it is at hand, or by a change that the solution counts, or a part of either."""
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            array = jnp.asarray(atom.val, aval.dtype)
            return self.box(array, array.shape, Signature(), target)
        held = self.arrays[atom]
        if target not in held:
            source = self._free(atom, list(held), target)
            if source is None:
                ways = self.solution.boxes[atom]
                ways = sorted(ways, key=lambda box: box.target != target)
                box = next(box for box in ways if self._is_part(atom, box.target, target))
                source = box.target
                held[source] = self.box(held[box.source], atom.shape, box.source, source)
            held[target] = self.box(held[source], atom.shape, source, target)
        return held[target]

    def box(self, array: jax.Array, shape: tuple[int, ...], source: Signature, target: Signature) -> jax.Array:
        """A device's part of an array of this shape, in another signature."""
        for step in path(source, target, tuple(shape), array.dtype.itemsize, self.sizes):
            with jax.named_scope(f"box_{step.axis}_{step.source}_to_{step.target}"):
                array = take(step, array, self.sizes[step.axis])
        return array

    def _free(self, value: Value, held: list[Signature], target: Signature) -> Signature | None:
        return next((source for source in held if self._is_part(value, source, target)), None)

    def _is_part(self, value: Value, source: Signature, target: Signature) -> bool:
        return not any(s.cost.received for s in path(source, target, value.shape, value.itemsize, self.sizes))

    def run(self, steps: Steps) -> None:
        """Runs nodes and loops in order."""
        for step in steps:
            if isinstance(step, Loop):
                self.loop(step)
            else:
                inputs = [self.read(step, position) for position in range(len(step.inputs))]
                self.keep(step, evaluate(step, self.solution.chosen[step], inputs, self.sizes))

    def loop(self, loop: Loop) -> None:
        """A scan over each device's parts."""
        consts = [self.read(node, 0) for node in loop.consts]

        def turn(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            scope = _Scope(self.solution, self.sizes)
            for nodes, arrays in ((loop.consts, consts), (loop.carry, carry), (loop.xs, xs)):
                for node, array in zip(nodes, arrays, strict=True):
                    scope.keep(node, (array,))
            scope.run(loop.body)
            return [scope.read(node, 1) for node in loop.carry], [scope.read(node, 0) for node in loop.ys]

        start, xs = [self.read(node, 0) for node in loop.carry], [self.read(node, 0) for node in loop.xs]
        carry, stacks = lax.scan(turn, start, xs, loop.length, loop.reverse)
        for node, array in zip(loop.carry, carry, strict=True):
            self.keep(node, (array,), 1)
        for node, array in zip(loop.ys, stacks, strict=True):
            self.keep(node, (array,))


# One equation on a device's parts


def evaluate(node: Node, choice: Choice, inputs: list[Any], sizes: Sizes) -> Sequence[jax.Array]:
    """The parts of an equation's results."""
    equation = node.equation
    assert equation is not None
    primitive: Any = equation.primitive
    name, params = primitive.name, dict(primitive.get_bind_params(equation.params))
    shape = _part(node.outputs[0], choice.outputs[0], sizes) if node.outputs else ()
    match name:
        case "broadcast_in_dim" | "iota":
            params["shape"] = shape
        case "reshape":
            params["new_sizes"] = shape
        case "dynamic_slice":
            params["slice_sizes"] = shape
        case "slice":
            whole = zip(params["limit_indices"], node.outputs[0].shape, inputs[0].shape, shape, strict=True)
            # a dimension that is split is not cut, see rules
            params["limit_indices"] = tuple(a if n == part else held for a, n, held, part in whole)
        case "gather":
            return [_gather(node, choice, inputs, params)]
        case "scatter-add" | "scatter_add" if _chosen_axes(node, choice):
            inputs[1] = _shift(node, choice, inputs, params["mode"])[0]
            params["mode"] = GatherScatterMode.FILL_OR_DROP
    with jax.named_scope(name):
        results = _bound(node, inputs, params)
    if name == "iota":
        axes, along = choice.outputs[0].split(params["dimension"]), params["dimension"]
        return [result + (_index(axes) * shape[along]).astype(result.dtype) for result in results] if axes else results
    axes = tuple(axis for axis, rule in choice.rules.items() if rule.inside)
    if axes:
        over: Any = lax.pmax if name == "reduce_max" else lax.pmin
        return [over(result, axes) for result in results]
    return results


def _bound(node: Node, inputs: list[Any], params: dict[str, Any]) -> list[jax.Array]:
    assert node.equation is not None
    primitive: Any = node.equation.primitive
    found = primitive.bind(*inputs, **params)
    return list(found) if primitive.multiple_results else [found]


def _part(value: Value, signature: Signature, sizes: Sizes) -> tuple[int, ...]:
    parts = splits(signature, sizes)
    return tuple(size // parts.get(dim, 1) for dim, size in enumerate(value.shape))


def _index(axes: tuple[str, ...]) -> jax.Array:
    """The number of a device's part, of a dimension that lies split over axes, outermost first."""
    return lax.axis_index(axes) if axes else jnp.int32(0)


def _chosen_axes(node: Node, choice: Choice) -> tuple[str, ...]:
    """The axes over which a gather's or scatter's array lies split along a dimension that indices choose from."""
    assert node.equation is not None
    names = indexed(node.equation)[0]
    return tuple(a for dim, name in enumerate(names) if name[0] == "v" for a in choice.inputs[0].split(dim))


def _shift(node: Node, choice: Choice, inputs: list[Any], mode: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Indices into this device's part of the array, out of range where another device has the entry; which slices are
    this device's; and which lie outside of the whole array."""
    equation = node.equation
    assert equation is not None and isinstance(node.inputs[0], Value)
    numbers, gathers = equation.params["dimension_numbers"], equation.primitive.name == "gather"
    chosen = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    clips = mode == GatherScatterMode.CLIP or (gathers and mode == GatherScatterMode.PROMISE_IN_BOUNDS)
    names, shape, part = indexed(equation)[0], node.inputs[0].shape, inputs[0].shape
    index, columns = inputs[1], []
    mine, outside = jnp.ones(index.shape[:-1], bool), jnp.zeros(index.shape[:-1], bool)
    for position, dim in enumerate(chosen):
        column = index[..., position]
        if names[dim][0] == "v":
            outside |= (column < 0) | (column >= shape[dim])
            if clips:
                column = jnp.clip(column, 0, shape[dim] - 1)
            column = column - (_index(choice.inputs[0].split(dim)) * part[dim]).astype(column.dtype)
            ours = (column >= 0) & (column < part[dim])
            mine, column = mine & ours, jnp.where(ours, column, part[dim])
        columns.append(column)
    return jnp.stack(columns, -1), mine, outside


def _gather(node: Node, choice: Choice, inputs: list[Any], params: dict[str, Any]) -> jax.Array:
    """Rows of this device's part, zeros where another has them; what is outside of the whole array is filled once."""
    equation = node.equation
    assert equation is not None
    array, indices, slices = indexed(equation)
    params["slice_sizes"] = tuple(
        size if name[0] in "vubw" else part
        for size, name, part in zip(params["slice_sizes"], array, inputs[0].shape, strict=True)
    )
    axes = _chosen_axes(node, choice)
    if not axes:
        return _bound(node, inputs, params)[0]
    index, mine, outside = _shift(node, choice, inputs, params["mode"])
    found = _bound(node, [inputs[0], index], params | {"mode": GatherScatterMode.CLIP})[0]
    spread = [d for d, name in enumerate(slices) if name in indices]
    over = [d for d in range(found.ndim) if d not in spread]
    mine, outside = jnp.expand_dims(mine, over), jnp.expand_dims(outside, over)
    nothing: Any = 0
    if params["mode"] == GatherScatterMode.FILL_OR_DROP:
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        first = _index(axes) == 0
        nothing = jnp.where(outside & first, fill, 0).astype(found.dtype)
    return jnp.where(mine, found, nothing).astype(found.dtype)
