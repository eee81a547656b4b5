"""SBP by its definition, in numpy: what tests compare the algebra and the boxing with."""

import itertools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxgpt.sharding.sbp import B, P, Place, S, Signature


def cut(whole: np.ndarray, place: Place, p: int, rng: np.random.Generator) -> list[np.ndarray]:
    """A tensor as p devices of one axis hold it. Parts of a sum are random whole numbers, so that sums are exact."""
    if isinstance(place, S):
        return np.split(whole, p, axis=place.dim)
    if place is B:
        return [whole] * p
    parts = [rng.integers(-9, 9, whole.shape).astype(whole.dtype) for _ in range(p - 1)]
    return [*parts, whole - sum(parts)]


def join(parts: list[np.ndarray], place: Place) -> np.ndarray:
    """The logical tensor that p devices of one axis hold; asserts that B copies are equal."""
    if isinstance(place, S):
        return np.concatenate(parts, axis=place.dim)
    if place is P:
        return np.sum(parts, axis=0)
    for part in parts:
        np.testing.assert_allclose(part, parts[0], rtol=1e-5, atol=1e-5)
    return parts[0]


Locals = dict[tuple[int, ...], np.ndarray]
"""Coordinates on the mesh -> what that device holds."""


def cut_all(whole: np.ndarray, signature: Signature, sizes: Mapping[str, int], rng: np.random.Generator) -> Locals:
    """A tensor as the devices of a mesh hold it, cut axis by axis from the outermost."""
    order = _order(signature, sizes)
    held = {(): whole}
    for axis in order:
        held = {
            (*place, i): part
            for place, tensor in held.items()
            for i, part in enumerate(cut(tensor, signature[axis], sizes[axis], rng))
        }
    position = [order.index(axis) for axis in sizes]
    return {tuple(place[i] for i in position): tensor for place, tensor in held.items()}


def join_all(held: Locals, signature: Signature, sizes: Mapping[str, int]) -> np.ndarray:
    """The logical tensor that the devices of a mesh hold, put together from the innermost axis."""
    order, names = _order(signature, sizes), list(sizes)
    tensors = {tuple(place[names.index(axis)] for axis in order): tensor for place, tensor in held.items()}
    for axis in reversed(order):
        outer = itertools.product(*(range(sizes[a]) for a in order[: order.index(axis)]))
        tensors = {place: join([tensors[(*place, i)] for i in range(sizes[axis])], signature[axis]) for place in outer}
    return tensors[()]


def _order(signature: Signature, sizes: Mapping[str, int]) -> list[str]:
    """P before S before B, so that copies are copies of one and the same; splits in their own order."""
    rank = {P: 0, B: 2}
    return sorted(dict.fromkeys((*signature, *sizes)), key=lambda axis: rank.get(signature[axis], 1))


def mesh(sizes: Mapping[str, int]) -> Mesh:
    """Of CPU devices, all axes Explicit."""
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(list(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def put(whole: np.ndarray, signature: Signature, on: Mesh, rng: np.random.Generator) -> jax.Array:
    """A jax.Array of that signature, each device given what the definition says."""
    held = cut_all(whole, signature, dict(on.shape), rng)
    parts = [jax.device_put(held[place], on.devices[place]) for place in np.ndindex(*on.devices.shape)]
    return jax.make_array_from_single_device_arrays(whole.shape, NamedSharding(on, signature.spec()), parts)


def held_by(array: jax.Array, on: Mesh) -> Locals:
    """What each device holds of an array."""
    of_device = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    return {place: of_device[on.devices[place]] for place in np.ndindex(*on.devices.shape)}


def whole(array: jax.Array, signature: Signature, on: Mesh) -> np.ndarray:
    """The logical tensor of an array, read by the definition, without asking JAX what it means."""
    return join_all(held_by(array, on), signature, dict(on.shape))
