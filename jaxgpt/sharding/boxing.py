"""Boxing: changing a tensor's SBP signature, by collectives that the program emits itself.

On one axis of p devices, T bytes of tensor in each group of the axis (OneFlow's table, arXiv 2110.15032):

    S(i) -> B     all-gather      (p-1)/p T received by each device
    S(i) -> S(j)  all-to-all      (p-1)/p^2 T
    P -> B        all-reduce      2 (p-1)/p T
    P -> S(i)     reduce-scatter  (p-1)/p T
    B -> S(i)     slice           0: each keeps its part
    B -> P        zeros           0: the first keeps its copy, the others hold zeros
    S(i) -> P     pad             0: each holds its part and zeros elsewhere

On several axes it is a sequence of such steps, see path. Nothing is left to the compiler, which takes permutes and
all-reduces with slices where a reduce-scatter would do.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxgpt.errors import UserError
from jaxgpt.sharding.entry import shard_map
from jaxgpt.sharding.named import varying
from jaxgpt.sharding.sbp import B, P, Place, S, Signature, check, named_sharding, padded_shape, sbp, splits, typed_axes

# Costs

KINDS = {
    "SB": "all-gather",
    "SS": "all-to-all",
    "PB": "all-reduce",
    "PS": "reduce-scatter",
    "BS": "slice",
    "BP": "zeros",
    "SP": "pad",
}
"""Change on one axis, S of any dimension -> what does it; the first four are collectives."""


@dataclass(frozen=True)
class Cost:
    """What one change on one axis takes. Bytes are those of one device."""

    kind: str
    """One of KINDS, a collective by the name that compiled programs give it; "none" where nothing changes."""
    operand: int
    """Bytes that go in: what the device held."""
    result: int
    """Bytes that come out: what it holds then."""
    received: Fraction
    """Bytes that it receives from the others, by the ring algorithms."""
    oneflow: float
    """OneFlow's figure: bytes that all devices together move; not free where OneFlow steers away, infinite where its
    graph mode refuses."""


def cost(source: Place, target: Place, nbytes: int, p: int) -> Cost:
    """Of a change on an axis of p devices; nbytes: of the tensor that each group of the axis holds together."""
    kind = KINDS[_letter(source) + _letter(target)] if source != target and p > 1 else "none"
    ring = Fraction(nbytes * (p - 1), p)
    turns = {"all-gather": Fraction(1), "reduce-scatter": Fraction(1), "all-reduce": Fraction(2)}
    received = ring * (turns | {"all-to-all": Fraction(1, p)}).get(kind, Fraction(0))
    operand, result = (nbytes // p if isinstance(place, S) else nbytes for place in (source, target))
    # Its penalty for B -> P counts the devices of source and target, which are the same here.
    oneflow = {"slice": 1.0, "zeros": 4.0 * nbytes * (p + p), "pad": math.inf}.get(kind, float(p * received))
    return Cost(kind, operand, result, received, oneflow)


def _letter(place: Place) -> str:
    return "S" if isinstance(place, S) else place.value


# The sequence of steps


@dataclass(frozen=True)
class Step:
    """A change on one axis, the other axes staying as they are."""

    axis: str
    source: Place
    target: Place
    after: Signature
    cost: Cost

    def __str__(self) -> str:
        received = f"{float(self.cost.received):.0f} B received"
        return f"{self.axis}: {self.source} -> {self.target}, {self.cost.kind}, {received}"


def path(
    source: Signature, target: Signature, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """The steps from source to target in which one device receives the fewest bytes; of equals the fewest steps.

    So partial sums are reduced before anything is gathered, and into parts where the rest of the way allows. Only an
    innermost axis can leave a dimension, and one that comes becomes the innermost, since each step keeps the parts in
    order. Axes that change, or split a dimension that a changing axis splits, may pass through any place but P, for
    which each device would hold zeros for the whole tensor. Axes of one device take no step. Raises UserError for a
    signature that the shape cannot have.
    """
    for signature in (source, target):
        check(signature, shape, sizes)
    axes = tuple((axis, size) for axis, size in sizes.items() if size > 1)
    large = [axis for axis, _ in axes]
    return _path(source.on(large), target.on(large), tuple(shape), itemsize, axes)


@functools.lru_cache(maxsize=4096)
def _path(
    source: Signature, target: Signature, shape: tuple[int, ...], itemsize: int, axes: tuple[tuple[str, int], ...]
) -> tuple[Step, ...]:
    sizes, order = dict(axes), itertools.count()
    movable = _movable(source, target, [axis for axis, _ in axes])
    best: dict[Signature, tuple[Fraction, int]] = {source: (Fraction(0), 0)}
    queue: list[tuple[Fraction, int, int, Signature, tuple[Step, ...]]] = [(Fraction(0), 0, next(order), source, ())]
    while True:  # every place can be reached by way of B, so the queue does not run empty
        received, count, _, here, steps = heapq.heappop(queue)
        if here == target:
            return steps
        if best[here] < (received, count):
            continue
        for step in _steps(here, target, movable, shape, itemsize, sizes):
            total = received + step.cost.received, count + 1
            if step.after not in best or total < best[step.after]:
                best[step.after] = total
                heapq.heappush(queue, (*total, next(order), step.after, (*steps, step)))


def _movable(source: Signature, target: Signature, axes: list[str]) -> list[str]:
    """The axes that change, or are in the way of one that does because both split one dimension."""
    dims = {place.dim for signature in (source, target) for place in signature.values() if isinstance(place, S)}
    changed = {axis for axis in axes if source[axis] != target[axis]}
    for dim in dims:
        before, after = source.split(dim), target.split(dim)
        if before != after:
            changed |= {*before, *after}
    return [axis for axis in axes if axis in changed]


def _steps(
    here: Signature,
    target: Signature,
    movable: list[str],
    shape: tuple[int, ...],
    itemsize: int,
    sizes: Mapping[str, int],
) -> Iterator[Step]:
    """Every legal change of one movable axis."""
    parts = splits(here, sizes)
    held = math.prod(shape) * itemsize // math.prod(parts.values())
    for axis in movable:
        place = here[axis]
        if isinstance(place, S) and here.split(place.dim)[-1] != axis:
            continue
        t = held * sizes[axis] if isinstance(place, S) else held
        even = [S(d) for d, size in enumerate(shape) if size % (parts.get(d, 1) * sizes[axis]) == 0]
        for to in (B, *even, *((P,) if target[axis] is P else ())):
            if to != place:
                yield Step(axis, place, to, here.change(axis, to), cost(place, to, t, sizes[axis]))


# The change itself


def to_sbp(x: jax.Array, signature: Mapping[str, Place]) -> jax.Array:
    """x with another signature on its mesh: the same logical tensor, moved along path. Axes not named become B.

    Works on arrays and inside jit, over the Explicit axes; inside a shard_map over the axes that are left to types
    (where jax before 0.12 knows no P). A P array is one whose layout is PartitionSpec(..., unreduced={axis}): JAX adds
    such arrays, and refuses what would be wrong. The gradient, of reverse mode alone, moves back along the cheapest
    path as well; where x is P, its gradient is B, which JAX calls `reduced`. Raises UserError for a signature that x
    cannot have.
    """
    wanted = Signature(signature)
    check(wanted, x.shape, _mesh_of(x)[1])
    if wanted.partial and not jnp.issubdtype(x.dtype, jnp.number):
        raise UserError(f"tensor of type {x.dtype}: P on axis {wanted.partial[0]} is a sum, which needs numbers")
    return _boxed(wanted.spec(), x)


def pad(x: jax.Array, signature: Mapping[str, Place]) -> jax.Array:
    """x with zeros at the end of every dimension that signature could not split evenly; the layout stays x's.

    The caller keeps the true sizes, and slices the result of what follows. A dimension to pad must not yet be split:
    UserError where it is.
    """
    wanted, have = Signature(signature), sbp(x)
    shape = padded_shape(x.shape, wanted, _mesh_of(x)[1])
    for dim, (old, new) in enumerate(zip(x.shape, shape, strict=True)):
        if old != new and have.split(dim):
            fix = f"make it B on {', '.join(have.split(dim))} first"
            tensor = f"tensor of shape {list(x.shape)}"
            raise UserError(f"{tensor}: dimension {dim} is split and cannot be padded to {new}; {fix}")
    return jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape, strict=True)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _boxed(target: PartitionSpec, x: jax.Array) -> jax.Array:
    """_move with a gradient. JAX's own would be right, but would make the gradient of a slice an all-reduce."""
    return _move(target, x)


def _boxed_forward(target: PartitionSpec, x: jax.Array) -> tuple[jax.Array, "_Layout"]:
    return _boxed(target, x), _Layout(named_sharding(x).spec)


def _boxed_backward(target: PartitionSpec, source: "_Layout", gradient: jax.Array) -> tuple[jax.Array]:
    spec = source.spec
    return (_boxed(PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced), gradient),)


_boxed.defvjp(_boxed_forward, _boxed_backward)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Layout:
    """A layout, kept for the gradient as part of the program instead of as data."""

    spec: PartitionSpec


def _move(target: PartitionSpec, x: jax.Array) -> jax.Array:
    mesh, sizes = _mesh_of(x)
    source = named_sharding(x).spec
    if Signature.from_spec(source, ()) == Signature.from_spec(target, ()) and source.reduced == target.reduced:
        return x
    moved = _program(mesh, tuple(sizes), source, target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    # The shard_map inside does not follow over which axes of an outer shard_map values differ: say it again.
    return varying(moved, x) if len(sizes) < len(mesh.axis_names) else moved


@functools.lru_cache(maxsize=1024)
def _program(
    mesh: Any, axes: tuple[str, ...], source: PartitionSpec, target: PartitionSpec, array: jax.ShapeDtypeStruct
) -> Any:
    """The jitted function that takes the path."""
    sizes, itemsize = {axis: mesh.shape[axis] for axis in axes}, array.dtype.itemsize
    steps = path(Signature.from_spec(source, axes), Signature.from_spec(target, axes), array.shape, itemsize, sizes)

    def boxing(x: jax.Array) -> jax.Array:
        for step in steps:
            with jax.named_scope(f"box_{step.axis}_{step.source}_to_{step.target}"):
                x = take(step, x, sizes[step.axis])
        return x

    # Types are not checked inside: they do not yet allow a slice of what is P on another axis.
    inside = shard_map(boxing, mesh=mesh, in_specs=source, out_specs=target, axis_names=set(axes), check_vma=False)
    return jax.jit(inside)


def take(step: Step, x: jax.Array, p: int) -> jax.Array:
    """One step on each device's tensor, inside of a shard_map; p: devices along the axis."""
    axis, index = step.axis, lax.axis_index(step.axis)
    old, new = (place.dim if isinstance(place, S) else 0 for place in (step.source, step.target))
    match step.cost.kind:
        case "all-gather":
            return lax.all_gather(x, axis, axis=old, tiled=True)
        case "all-to-all":
            return lax.all_to_all(x, axis, split_axis=new, concat_axis=old, tiled=True)
        case "all-reduce":
            return lax.psum(x, axis)
        case "reduce-scatter":
            return lax.psum_scatter(x, axis, scatter_dimension=new, tiled=True)
        case "slice":
            size = x.shape[new] // p
            return lax.dynamic_slice_in_dim(x, index * size, size, new)
        case "pad":
            whole = jnp.zeros([size * p if dim == old else size for dim, size in enumerate(x.shape)], x.dtype)
            return lax.dynamic_update_slice_in_dim(whole, x, index * x.shape[old], old)
    return jnp.where(index == 0, x, jnp.zeros_like(x))


def _mesh_of(x: jax.Array) -> tuple[Any, dict[str, int]]:
    """The mesh that x lies on, and the sizes of the axes of which its type speaks. UserError for an Auto axis."""
    found = named_sharding(x)
    for axis, kind in zip(found.mesh.axis_names, found.mesh.axis_types, strict=True):
        if kind == AxisType.Auto:
            raise UserError(f"mesh axis {axis} is Auto, for which JAX has no P; make the mesh with jax.make_mesh")
    return found.mesh, {axis: found.mesh.shape[axis] for axis in typed_axes(found)}
