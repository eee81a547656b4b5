"""SBP signatures: how one logical tensor lies on each axis of a mesh (OneFlow, arXiv 2110.15032).

S(i), split: the devices' tensors, put together along dimension i, are the logical tensor.
B, broadcast: every device holds the logical tensor.
P, partial: the sum of the devices' tensors is the logical tensor.

In JAX S(i) on an axis is the axis' name at position i of a PartitionSpec, B its absence, P its name among `unreduced`.
The algebra is here; changing a signature is in boxing, and what operators make of signatures in inference.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, SupportsIndex

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxgpt.errors import UserError


@dataclass(frozen=True)
class S:
    """Split along dimension `dim`, counted from 0."""

    dim: int

    def __repr__(self) -> str:
        return f"S({self.dim})"


class Unsplit(Enum):
    """Every device's tensor has the logical shape."""

    B = "B"
    P = "P"

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__


B = Unsplit.B
P = Unsplit.P
Place = S | Unsplit
"""What a tensor is on one mesh axis."""


class Signature(Mapping[str, Place]):
    """Mesh axis -> S(dim), B or P.

    An axis that is not named is B, so two signatures are equal when they differ in B alone. Axes that split the same
    dimension are ordered from the outermost, which cuts first, to the innermost: the order in which they are given.
    """

    def __init__(self, places: Mapping[str, Place] | None = None, axes: Sequence[str] = ()) -> None:
        """axes: the mesh's own order, in which to print; where it is not given, that of places. Raises UserError for a
        place that is none of S(dim), B and P: one that is not understood would else be taken for B."""
        places = {} if places is None else places
        for axis, place in places.items():
            if not (isinstance(place, Unsplit) or (isinstance(place, S) and isinstance(place.dim, SupportsIndex))):
                raise UserError(f"axis {axis}: {place!r} is not a place; give S(dim), dim a whole number, or B or P")
        known = places.axes if isinstance(places, Signature) else places
        self.axes: tuple[str, ...] = tuple(dict.fromkeys((*axes, *known)))
        self._places: dict[str, Place] = {**places, **{axis: B for axis in self.axes if axis not in places}}

    @classmethod
    def from_spec(cls, spec: PartitionSpec, axes: Sequence[str]) -> "Signature":
        """What a PartitionSpec says on a mesh of these axes. `reduced` is B: it speaks of the gradient."""
        places: dict[str, Place] = {}
        for dim, entry in enumerate(spec.partitions):
            if entry is PartitionSpec.UNCONSTRAINED:
                raise UserError(f"{spec}: an unconstrained dimension has no SBP signature; say where it lies")
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                places[axis] = S(dim)
        kind = getattr(spec, "unreduced_kind", None)  # since jax 0.12
        if kind is not None and kind.name != "sum":
            raise UserError(f"{spec}: P is a sum here, not a {kind.name}; reduce it first")
        return cls(places | dict.fromkeys(spec.unreduced, P), axes)

    def spec(self, reduced: Sequence[str] = ()) -> PartitionSpec:
        """As PartitionSpec. reduced: B axes on which the gradient is to be P."""
        dims = max((place.dim for place in self.values() if isinstance(place, S)), default=-1) + 1
        split = [self.split(dim) for dim in range(dims)]
        entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in split]
        return PartitionSpec(*entries, unreduced=frozenset(self.partial), reduced=frozenset(reduced))

    def split(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dimension, outermost first."""
        return tuple(axis for axis, place in self._places.items() if place == S(dim))

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes on which the tensor is P."""
        return tuple(axis for axis, place in self._places.items() if place is P)

    def change(self, axis: str, place: Place) -> "Signature":
        """With another place on one axis; an axis that comes to split a dimension is its innermost."""
        rest = {a: p for a, p in self._places.items() if a != axis}
        return Signature({**rest, axis: place}, self.axes)

    def on(self, axes: Sequence[str]) -> "Signature":
        """The part on some of the axes."""
        return Signature({a: p for a, p in self._places.items() if a in axes}, [a for a in self.axes if a in axes])

    def __getitem__(self, axis: str) -> Place:
        return self._places.get(axis, B)

    def __contains__(self, axis: object) -> bool:
        return axis in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def _key(self) -> frozenset[Any]:
        dims = {place for place in self.values() if isinstance(place, S)}
        return frozenset({(place, self.split(place.dim)) for place in dims} | {(P, axis) for axis in self.partial})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        """ "[data: S(0), tensor: B]" in the mesh's order; axes that split one dimension in order of cutting."""
        order = {place: iter(self.split(place.dim)) for place in self.values() if isinstance(place, S)}
        places = [self._places[axis] for axis in self.axes]
        names = [next(order[p]) if isinstance(p, S) else axis for axis, p in zip(self.axes, places, strict=True)]
        return f"[{', '.join(f'{axis}: {place}' for axis, place in zip(names, places, strict=True))}]"


def sbp(x: Any) -> Signature:
    """The signature of a jax.Array, or of a NamedSharding.

    Inside jit it is read from the type, so the mesh's axes must be Explicit; inside a shard_map the axes over which
    that is manual are left out, since there the program itself knows what differs. An array on no mesh has the empty
    signature. Raises UserError where a layout names no axes.
    """
    found = _layout(x)
    if isinstance(found, SingleDeviceSharding) or (isinstance(found, NamedSharding) and found.mesh.empty):
        return Signature()
    sharding = named_sharding(x)
    return Signature.from_spec(sharding.spec, typed_axes(sharding))


def named_sharding(x: Any) -> NamedSharding:
    """An array's mesh and PartitionSpec, from its type inside jit. Raises UserError where it has none."""
    found = _layout(x)
    if not isinstance(found, NamedSharding) or found.mesh.empty:
        raise UserError(f"a layout of {type(found).__name__} lies on no mesh; give the array a NamedSharding first")
    return found


def _layout(x: Any) -> Any:
    return jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", x)


def typed_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """The axes of which a layout speaks: all of a mesh of devices, inside jit those in the types.

    Raises UserError inside jit for an Auto axis, whose layout only the compiler knows.
    """
    mesh = sharding.mesh
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return tuple(mesh.axis_names)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    unknown = [axis for axis, kind in kinds.items() if kind == AxisType.Auto]
    if unknown:
        raise UserError(
            f"mesh axis {unknown[0]} is Auto: inside jit only the compiler knows the layout; make it Explicit"
        )
    return tuple(axis for axis, kind in kinds.items() if kind == AxisType.Explicit)


def splits(signature: Signature, sizes: Mapping[str, int]) -> dict[int, int]:
    """Dimension -> into how many parts it is cut."""
    found: dict[int, int] = {}
    for axis, place in signature.items():
        if isinstance(place, S):
            found[place.dim] = found.get(place.dim, 1) * sizes[axis]
    return found


def check(signature: Signature, shape: Sequence[int], sizes: Mapping[str, int], name: str = "tensor") -> None:
    """Refuses a signature that a tensor of this shape cannot have on a mesh of these sizes.

    Raises UserError naming tensor, dimension, axis and sizes: an axis that is not there, a dimension that is not
    there, a dimension that does not divide (pad it first, see boxing.pad).
    """
    tensor = f"{name} of shape {list(shape)}"
    _check_places(signature, shape, sizes, tensor)
    for dim, parts in splits(signature, sizes).items():
        if shape[dim] % parts:
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in signature.split(dim))
            fix = f"pad it to {math.ceil(shape[dim] / parts) * parts} (boxing.pad), or split another"
            raise UserError(f"{tensor}: dimension {dim} of size {shape[dim]} does not divide over {over}; {fix}")


def _check_places(signature: Signature, shape: Sequence[int], sizes: Mapping[str, int], tensor: str) -> None:
    """Refuses an axis or a dimension that is not there."""
    for axis, place in signature.items():
        if axis not in sizes:
            raise UserError(f"{tensor}: {signature} names axis {axis!r}; the mesh has {', '.join(sizes)}")
        if isinstance(place, S) and not 0 <= place.dim < len(shape):
            there = f"dimensions 0 to {len(shape) - 1}" if shape else "no dimensions"
            raise UserError(f"{tensor}: {place} on axis {axis} splits a dimension that it lacks; it has {there}")


def padded_shape(shape: Sequence[int], signature: Signature, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape with every dimension that does not divide made larger until it does. Raises UserError for an axis or a
    dimension that is not there."""
    _check_places(signature, shape, sizes, f"tensor of shape {list(shape)}")
    parts = splits(signature, sizes)
    return tuple(math.ceil(size / parts.get(dim, 1)) * parts.get(dim, 1) for dim, size in enumerate(shape))
