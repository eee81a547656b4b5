"""jax.shard_map, where arrays enter and leave as they lie, also if only some of the mesh's axes are manual.

jax before 0.12 tells the compiler of the manual axes alone, so that what is split over a typed axis is gathered at the
entry, and cut again by the first operation. XLA takes both out for GPUs but not for CPUs, where every step would gather
parameters and moments over `tensor`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax._src import shard_map as internals
from jax.sharding import AxisType, PartitionSpec

MENDED = (0, 12)
"""The version of jax that tells the compiler of all axes."""


def shard_map(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """jax.shard_map(function, **how)."""
    stated = internals._shardy_shard_map_sharding
    if jax.__version_info__ < MENDED and stated.__module__ == internals.__name__:
        internals._shardy_shard_map_sharding = _as_typed(stated)
    return jax.shard_map(function, **how)


def _as_typed(stated: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's function from a specification to what the compiler hears, with the array's type for the specification."""

    def sharding(context: Any, mesh: Any, manual: Any, spec: PartitionSpec, array: Any) -> Any:
        typed = AxisType.Auto not in array.sharding.mesh.axis_types
        return stated(context, mesh, manual, array.sharding.spec if typed else spec, array)

    return sharding
