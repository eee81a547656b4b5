"""The SBP rules of a traced program's equations, on one mesh axis: which places of inputs give which of outputs.

Each primitive is written as an operator in named dimensions (sharding.inference), so that its rules follow from what it
does: a dimension that is only carried along may be split, one that is summed over gives P, an operator takes P where it
is linear. A primitive that is not in the table has one rule, all B: every device computes the whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from jaxgpt.sharding import inference
from jaxgpt.sharding.inference import Operator
from jaxgpt.sharding.sbp import B, P, Place, S


@dataclass(frozen=True)
class Rule:
    """On one axis: places of inputs and outputs with which each device may run the equation on what it holds."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    inside: str = ""
    """ "max" or "min": the all-reduce of the outputs over the axis that belongs to the equation then."""

    @property
    def divided(self) -> bool:
        """Whether each device has a part of the work, instead of all of it."""
        return any(isinstance(place, S) for place in (*self.inputs, *self.outputs))


def rules(equation: JaxprEqn) -> tuple[Rule, ...] | None:
    """An equation's rules on one axis; None for a primitive that is not known, whose tensors are all B."""
    make = PRIMITIVES.get(equation.primitive.name)
    found = make(equation) if make else None
    if found is None:
        return None
    inside = {"reduce_max": "max", "reduce_min": "min"}.get(equation.primitive.name, "")
    outputs = len(equation.outvars)
    each = [Rule(r.inputs, (r.output,) * outputs, inside if r.inside else "") for r in found.rules]
    return tuple(rule for rule in dict.fromkeys(each) if _numbers(equation, rule))


def whole(equation: JaxprEqn) -> Rule:
    """The rule that every equation has."""
    return Rule((B,) * len(equation.invars), (B,) * len(equation.outvars))


def _numbers(equation: JaxprEqn, rule: Rule) -> bool:
    """Whether all that is P are floating-point numbers: a sum of integers or truths is not meant."""
    avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    places = zip(avals, (*rule.inputs, *rule.outputs), strict=True)
    return all(place is not P or jnp.issubdtype(aval.dtype, jnp.inexact) for aval, place in places)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


Names = Sequence[str]


def _operator(
    equation: JaxprEqn,
    inputs: Sequence[Names],
    output: Names,
    *,
    summed: Iterable[str] = (),
    whole: Iterable[str] = (),
    linear: Sequence[Sequence[int]] = (),
) -> Operator:
    """The operator of these named dimensions. linear: groups of inputs, by number, in which it is jointly linear."""
    tensors = {f"x{i}": " ".join(dims) for i, dims in enumerate(inputs)}
    return inference.operator(
        equation.primitive.name,
        f"{', '.join(f'{name}: {dims}' for name, dims in tensors.items())} -> {' '.join(output)}",
        summed=" ".join(summed),
        whole=" ".join(whole),
        linear=[" ".join(f"x{i}" for i in group) for group in linear],
    )


def _dims(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


# Element by element

SCALED = ((0,),)
NONLINEAR = """abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma eq erf erf_inv erfc exp
exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p log2 logistic lt max min ne nextafter not
one_minus_square or polynomial population_count pow reduce_precision rem round rsqrt shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square tan tanh xor""".split()
LINEAR = {
    "neg": SCALED,
    "div": SCALED,
    "real": SCALED,
    "imag": SCALED,
    "conj": SCALED,
    "mul": ((0,), (1,)),
    "add": ((0, 1),),
    "sub": ((0, 1),),
    "add_any": ((0, 1),),
}


def _elementwise(equation: JaxprEqn) -> Operator:
    name, shape = equation.primitive.name, _shape(equation.outvars[0])
    output = _dims(len(shape))
    inputs = [_spread(_shape(atom), shape, output) for atom in equation.invars]
    linear: Sequence[Sequence[int]] = LINEAR.get(name, ())
    if name == "convert_element_type" and _widens(equation):
        linear = SCALED
    if name == "select_n":
        linear = (tuple(range(1, len(inputs))),)
    ones = [dim for dims in inputs for dim in dims if dim[0] == "o"]
    return _operator(equation, inputs, output, whole=ones, linear=linear)


def _spread(shape: tuple[int, ...], whole: tuple[int, ...], dims: list[str]) -> list[str]:
    """Of an input: a scalar, and a dimension of one, go with every element."""
    return [dim if size == full else f"one{dim}" for size, full, dim in zip(shape, whole, dims, strict=False)]


def _widens(equation: JaxprEqn) -> bool:
    """Whether a cast loses nothing, so that the sum of casts is the cast of the sum."""
    old: Any = equation.invars[0].aval
    return bool(jnp.promote_types(old.dtype, equation.params["new_dtype"]) == equation.params["new_dtype"])


# Products and reductions


def _dot_general(equation: JaxprEqn) -> Operator:
    contracted, batch = equation.params["dimension_numbers"]
    names: list[list[str]] = []
    for side, atom in enumerate(equation.invars):
        dims = [f"{'lr'[side]}{d}" for d in range(len(_shape(atom)))]
        for letter, shared in (("c", contracted), ("b", batch)):
            for number, dim in enumerate(shared[side]):
                dims[dim] = f"{letter}{number}"
        names.append(dims)
    output = [f"b{number}" for number in range(len(batch[0]))]
    output += [dim for dims in names for dim in dims if dim[0] in "lr"]
    summed = [f"c{number}" for number in range(len(contracted[0]))]
    return _operator(equation, names, output, summed=summed, linear=((0,), (1,)))


def _reduce(equation: JaxprEqn) -> Operator:
    """Sum, maximum and minimum may be taken of parts; what else reduces needs the whole."""
    name, axes = equation.primitive.name, equation.params["axes"]
    dims = _dims(len(_shape(equation.invars[0])))
    gone, kept = [dims[d] for d in axes], [dim for d, dim in enumerate(dims) if d not in axes]
    if name == "reduce_sum":
        return _operator(equation, [dims], kept, summed=gone, linear=SCALED)
    found = _operator(equation, [dims], kept, whole=gone)
    if name not in ("reduce_max", "reduce_min"):
        return found
    parts = [inference.Rule((S(int(d)),), B, ("all-reduce",)) for d in axes]
    return replace(found, rules=(*found.rules, *parts))


def _along(dimension: str, linear: bool = False) -> Callable[[JaxprEqn], Operator]:
    """What goes along dimensions that must be whole, and keeps the shape: sort, cumulative sums, rev."""

    def make(equation: JaxprEqn) -> Operator:
        given = equation.params[dimension]
        dims = _dims(len(_shape(equation.invars[0])))
        along = [dims[d] for d in (given if isinstance(given, tuple) else (given,))]
        return _operator(equation, [dims] * len(equation.invars), dims, whole=along, linear=SCALED if linear else ())

    return make


def _top_k(equation: JaxprEqn) -> Operator | None:
    dims = _dims(len(_shape(equation.invars[0])))
    last = len(dims) - 1
    return _operator(equation, [dims], dims, whole=dims[-1:]) if equation.params.get("axis", last) == last else None


# Shapes


def _broadcast(equation: JaxprEqn) -> Operator:
    shape, output = _shape(equation.invars[0]), equation.params["shape"]
    dims = _dims(len(output))
    places = equation.params["broadcast_dimensions"]
    names = [dims[d] if shape[i] == output[d] else f"one{i}" for i, d in enumerate(places)]
    found = _operator(equation, [names], dims, whole=[n for n in names if n.startswith("one")], linear=SCALED)
    new = [inference.Rule((B,), S(d)) for d, dim in enumerate(dims) if dim not in names]
    return replace(found, rules=(*found.rules, *new))


def _iota(equation: JaxprEqn) -> Operator:
    dims = tuple(_dims(len(_shape(equation.outvars[0]))))
    split = [inference.Rule((), S(d)) for d in range(len(dims))]
    return Operator("iota", {}, dims, (inference.Rule((), B), *split))


def _reshape(equation: JaxprEqn) -> Operator | None:
    """Of dimensions that are merged or parted, the leading ones stay split: their parts are rows in order."""
    old, new = _shape(equation.invars[0]), _shape(equation.outvars[0])
    if equation.params.get("dimensions") is not None or 0 in old:
        return None
    before, after = ([f"{letter}{d}" for d in range(len(shape))] for letter, shape in (("i", old), ("o", new)))
    for number, (i, o) in enumerate(leading(old, new)):
        before[i] = after[o] = f"d{number}"
    free = [name for name in before if name[0] == "i"]
    return _operator(equation, [before], after, whole=free, linear=SCALED)


def leading(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of dimensions that lead in groups of equal product: (8, 6) and (2, 4, 6) give (0, 0) and (1, 2)."""
    i = o = 0
    while i < len(old) and o < len(new):
        starts, a, b = (i, o), old[i], new[o]
        i, o = i + 1, o + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, o = b * new[o], o + 1
        if a > 1:
            yield _large(old, starts[0]), _large(new, starts[1])


def _large(shape: Sequence[int], start: int) -> int:
    return next(d for d in range(start, len(shape)) if shape[d] > 1)


def _transpose(equation: JaxprEqn) -> Operator:
    dims = _dims(len(_shape(equation.invars[0])))
    return _operator(equation, [dims], [dims[d] for d in equation.params["permutation"]], linear=SCALED)


def _squeeze(equation: JaxprEqn) -> Operator:
    dims, gone = _dims(len(_shape(equation.invars[0]))), equation.params["dimensions"]
    kept = [dim for d, dim in enumerate(dims) if d not in gone]
    return _operator(equation, [dims], kept, whole=[dims[d] for d in gone], linear=SCALED)


def _cut(equation: JaxprEqn) -> Operator:
    """slice and dynamic_slice, pad, split: a dimension whose size changes must be whole."""
    old, new = _shape(equation.invars[0]), _shape(equation.outvars[0])
    dims = _dims(len(old))
    changed = [dim for dim, a, b in zip(dims, old, new, strict=True) if a != b]
    scalars = len(equation.invars) - 1
    linear = ((0, 1),) if equation.primitive.name == "pad" else SCALED
    return _operator(equation, [dims, *([[]] * scalars)], dims, whole=changed, linear=linear)


def _pad(equation: JaxprEqn) -> Operator | None:
    """A padding of as much as it takes away would keep the size and move what is in it."""
    return None if any(low < 0 or high < 0 for low, high, _ in equation.params["padding_config"]) else _cut(equation)


def _update(equation: JaxprEqn) -> Operator:
    old, new = _shape(equation.invars[0]), _shape(equation.invars[1])
    dims = _dims(len(old))
    changed = [dim for dim, a, b in zip(dims, old, new, strict=True) if a != b]
    scalars = len(equation.invars) - 2
    return _operator(equation, [dims, dims, *([[]] * scalars)], dims, whole=changed, linear=((0, 1),))


def _concatenate(equation: JaxprEqn) -> Operator:
    dims, count = _dims(len(_shape(equation.outvars[0]))), len(equation.invars)
    joined = dims[equation.params["dimension"]]
    return _operator(equation, [dims] * count, dims, whole=[joined], linear=(tuple(range(count)),))


# By index


def indexed(equation: JaxprEqn) -> tuple[list[str], list[str], list[str]]:
    """Names of the dimensions of a gather's or scatter's array, indices, and slices: "v" those that indices choose
    from, "o" those that are carried along, "w" and "u" those of which a part is taken, "b" and "i" those of the
    indices, of which each "b" is a dimension of the array as well."""
    gathers, numbers = equation.primitive.name == "gather", equation.params["dimension_numbers"]
    array, slices = _shape(equation.invars[0]), _shape(equation.outvars[0] if gathers else equation.invars[2])
    window = numbers.offset_dims if gathers else numbers.update_window_dims
    chosen = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
    by_index = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    shared = numbers.start_indices_batching_dims if gathers else numbers.scatter_indices_batching_dims
    names = [f"{('v' if d in by_index else 'u') if d in chosen else 'o'}{d}" for d in range(len(array))]
    index = [f"i{d}" for d in range(len(_shape(equation.invars[1])) - 1)]
    for number, (a, i) in enumerate(zip(numbers.operand_batching_dims, shared, strict=True)):
        names[a] = index[i] = f"b{number}"
    carried = [d for d, name in enumerate(names) if name[0] == "o"]
    for d, position in zip(carried, window, strict=True):
        if slices[position] != array[d]:
            names[d] = f"w{d}"
    window_names, index_names = iter([names[d] for d in carried]), iter(index)
    result = [next(window_names if d in window else index_names) for d in range(len(slices))]
    return names, [*index, "vector"], result


def _undivided(array: list[str]) -> list[str]:
    """What must be whole: with windows that may lie anywhere, all that indices choose from."""
    windows = [name for name in array if name[0] in "wu"]
    return ["vector", *windows, *(name for name in array if name[0] == "v" and windows)]


def _gather(equation: JaxprEqn) -> Operator:
    """Each device looks up what is in its rows, and zeros for the rest: P."""
    array, indices, slices = indexed(equation)
    whole = _undivided(array)
    summed = [n for n in array if n[0] == "v"]
    fills = equation.params["mode"] == GatherScatterMode.FILL_OR_DROP and equation.params["fill_value"]
    linear = () if fills else SCALED  # a number would be filled in by each
    return _operator(equation, [array, indices], slices, summed=summed, whole=whole, linear=linear)


def _scatter_add(equation: JaxprEqn) -> Operator:
    """Each device adds what falls into its rows; or its part of what is added, to an array that is P as well."""
    array, indices, slices = indexed(equation)
    whole = _undivided(array)
    summed = [n for n in indices if n[0] == "i"]
    found = _operator(equation, [array, indices, slices], array, summed=summed, whole=whole, linear=((0, 2),))
    each = [replace(r, inputs=(P, *r.inputs[1:])) if r.output is P else r for r in found.rules]
    return replace(found, rules=tuple(each))


PRIMITIVES: dict[str, Callable[[JaxprEqn], Operator | None]] = {
    **dict.fromkeys((*NONLINEAR, *LINEAR, "convert_element_type", "select_n"), _elementwise),
    **dict.fromkeys("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split(), _reduce),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod"), _along("axis")),
    **dict.fromkeys(("slice", "dynamic_slice", "split"), _cut),
    **dict.fromkeys(("scatter-add", "scatter_add"), _scatter_add),
    "cumsum": _along("axis", linear=True),
    "rev": _along("dimensions", linear=True),
    "sort": _along("dimension"),
    "top_k": _top_k,
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "pad": _pad,
    "dynamic_update_slice": _update,
    "concatenate": _concatenate,
    "gather": _gather,
}
