"""Arrays between hosts and devices, where a process holds some of the devices alone."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def put(values: np.ndarray, where: Sharding) -> jax.Array:
    """An array on its devices; every process has the same values and sends its own devices' parts."""
    if where.is_fully_addressable:
        return jax.device_put(values, where)
    return jax.make_array_from_callback(values.shape, where, lambda index: values[index])


def put_rows(values: np.ndarray, rows: np.ndarray, shape: tuple[int, int], where: Sharding) -> jax.Array:
    """An array [*shape, ...] on its devices, of which this process has those of the shape[0] * shape[1] rows that its
    own devices take: values[i] is row rows[i], and rows rise."""
    numbers = np.arange(shape[0] * shape[1]).reshape(shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        found = values[np.searchsorted(rows, numbers[index[:2]])]
        return found[(slice(None), slice(None), *index[2:])]

    return jax.make_array_from_callback((*shape, *values.shape[1:]), where, part)


def whole(array: jax.Array) -> np.ndarray:
    """All of an array, on the host of every process: each of them must ask for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    assert isinstance(array.sharding, NamedSharding)
    return np.asarray(jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec())))
