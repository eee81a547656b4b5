"""What one equation of a traced program communicates: the rules from primitives and types to changes of signature.

A collective that the program says itself is one change over the axes that it names. Over a typed axis the change
follows from the signatures: a product or sum over a split dimension leaves a partial sum, P, and the result's type says
what becomes of it; jax.reshard is boxing. Each change is costed by the table in boxing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn

from jaxgpt.sharding.boxing import Cost, cost
from jaxgpt.sharding.jaxprs import local_bytes, signature
from jaxgpt.sharding.sbp import B, P, Place, S

Axes = tuple[str, ...]
Sizes = Mapping[str, int]
"""Devices along each mesh axis."""

SUMS = ("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin")
GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
SCATTERS = ("reduce_scatter", "unreduced_reduce_scatter")
SILENT = ("axis_index", "pvary", "pcast", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p")
"""Primitives that name mesh axes and send nothing."""

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
LINEAR = ("dot_general", "reduce_sum")


@dataclass(frozen=True)
class Change:
    """Of the signature of one array, over axes of so many devices together."""

    axes: Axes
    devices: int
    text: str
    """ "P -> B"."""
    cost: Cost
    aval: Any
    """The array before the change."""
    assumed: bool = False
    """Whether no rule is known for the operation, and the compiler is taken to gather its operand."""


def changes(equation: JaxprEqn, sizes: Sizes) -> list[Change]:
    """The communication of an equation that has no program inside. Raises ValueError for an unknown collective."""
    operands, named = [v.aval for v in equation.invars], _named_axes(equation)
    if named and equation.primitive.name not in SILENT:
        found = [_said(equation, aval, named, sizes) for aval in operands]
    elif equation.primitive.name == "reshard":
        found = _reshard(operands[0], equation.outvars[0].aval, sizes)
    else:
        split = [a for aval in operands for a, place in signature(aval).items() if isinstance(place, S)]
        found = [change for axis in dict.fromkeys(split) for change in _derived(equation, axis, sizes)]
    return [change for change in found if change.devices > 1 and change.cost.received]


def _named_axes(equation: JaxprEqn) -> Axes:
    """The mesh axes that a primitive names: of a collective, over which it talks."""
    found = equation.params.get("axis_name", equation.params.get("axes", ()))
    return tuple(a for a in ((found,) if isinstance(found, str) else found) if isinstance(a, str))


def _said(equation: JaxprEqn, aval: Any, named: Axes, sizes: Sizes) -> Change:
    """A collective that the program says itself."""
    name, params = equation.primitive.name, equation.params
    axes = tuple(a for a in sizes if a in named and sizes[a] > 1)
    groups = params.get("axis_index_groups")
    p = len(groups[0]) if groups else prod(sizes[a] for a in axes)
    held = local_bytes(aval, sizes)
    if name in SUMS:
        return Change(axes, p, f"{_partial(name)} -> B", cost(P, B, held, p), aval)
    if name in GATHERS:
        return _boxing(axes, p, S(params["all_gather_dimension"]), B, held * p, aval)
    if name in SCATTERS:
        return _boxing(axes, p, P, S(params["scatter_dimension"]), held, aval)
    if name == "all_to_all":
        return _boxing(axes, p, S(params["concat_axis"]), S(params["split_axis"]), held * p, aval)
    if name == "ppermute":
        return Change(
            axes, p, "passed on", Cost("collective-permute", held, held, Fraction(held), float(held * p)), aval
        )
    raise ValueError(f"{name} over {', '.join(named)}: a collective that the ledger does not know")


def _reshard(before: Any, after: Any, sizes: Sizes) -> list[Change]:
    """Boxing, axis by axis: partial sums first, then what is gathered or moved."""
    source, target = signature(before), signature(after)
    held, found = local_bytes(before, sizes), []
    for axis in sorted({*source, *target}, key=lambda axis: source[axis] is not P):
        whole = held * sizes[axis] if isinstance(source[axis], S) else held
        found.append(_boxing((axis,), sizes[axis], source[axis], target[axis], whole, before))
        held = found[-1].cost.result
    return found


def _derived(equation: JaxprEqn, axis: str, sizes: Sizes) -> list[Change]:
    """What the types make necessary over one typed axis that splits an operand."""
    name, p = equation.primitive.name, sizes[axis]
    operands, result = [v.aval for v in equation.invars], equation.outvars[0].aval
    places, after = [signature(aval)[axis] for aval in operands], signature(result)[axis]
    if any(place == S(dim) for place, summed in zip(places, _summed(equation), strict=True) for dim in summed):
        whole = local_bytes(result, sizes) * (p if isinstance(after, S) else 1)
        return [Change((axis,), p, f"{_partial(name)} -> {after}", cost(P, after, whole, p), result)]
    lost = [i for i, place in enumerate(places) if isinstance(place, S)]
    if name == "dot_general":  # the result can be split as one operand is; another that is split is gathered first
        lost = [i for i in lost if _result_place(equation, i, places[i]) != after]
    elif any(isinstance(signature(v.aval)[axis], S) for v in equation.outvars):
        lost = [i for i in lost if any(places[i] == S(dim) for dim in _moved(equation))]
    gathered = [_boxing((axis,), p, places[i], B, local_bytes(operands[i], sizes) * p, operands[i]) for i in lost]
    return gathered if name == "dot_general" else [replace(change, assumed=True) for change in gathered]


def _boxing(axes: Axes, p: int, source: Place, target: Place, whole: int, aval: Any) -> Change:
    """whole: bytes of what a group of the axes holds together."""
    return Change(axes, p, f"{source} -> {target}", cost(source, target, whole, p), aval)


def _partial(name: str) -> str:
    """What an operation leaves on each device: a partial sum, P, or another partial result by its name."""
    return "P" if name in LINEAR or "psum" in name else name.removeprefix("reduce_").removeprefix("p")


def _summed(equation: JaxprEqn) -> list[Sequence[int]]:
    """For each operand the dimensions that the operation sums over (or takes the largest of, ...)."""
    if equation.primitive.name == "dot_general":
        return list(equation.params["dimension_numbers"][0])
    return [equation.params["axes"] if equation.primitive.name in REDUCTIONS else () for _ in equation.invars]


def _moved(equation: JaxprEqn) -> Sequence[int]:
    """The dimensions along which an operation moves elements, so that devices have need of each other's."""
    name, params = equation.primitive.name, equation.params
    if name in ("rev", "concatenate"):
        return tuple(params["dimensions"]) if name == "rev" else (params["dimension"],)
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    if name == "fft":
        return tuple(range(before.ndim))[-len(params["fft_lengths"]) :]
    if name in ("slice", "dynamic_slice", "pad"):
        return [dim for dim in range(before.ndim) if before.shape[dim] != after.shape[dim]]
    return ()


def _result_place(equation: JaxprEqn, operand: int, place: Place) -> Place:
    """How a product would be split if this operand alone were, along one of the dimensions that it keeps."""
    if not isinstance(place, S):
        return place
    contracting, batch = equation.params["dimension_numbers"]
    if place.dim in batch[operand]:
        return S(tuple(batch[operand]).index(place.dim))
    avals: list[Any] = [v.aval for v in equation.invars]
    free = [[d for d in range(avals[i].ndim) if d not in (*contracting[i], *batch[i])] for i in range(2)]
    before = len(batch[0]) + (len(free[0]) if operand == 1 else 0)
    return S(before + free[operand].index(place.dim))
