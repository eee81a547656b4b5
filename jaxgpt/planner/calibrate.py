"""Measures devices that are present, so that a plan for them rests on what they do, not on what their vendor says.

    calibrated(present(jax.devices()), jax.devices(), "bf16")

All devices work at once, as in training: virtual CPU devices share cores and memory. Takes a few seconds.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxgpt.planner.hardware import Dtype, Hardware, Link
from jaxgpt.planner.kernels import shape_efficiency

REPEATS = 3
"""Runs of each measurement, of which the shortest counts."""
TURNS = 8
"""Times that a run does what is measured, so that its start counts little."""
ALL = "all"
"""The mesh axis of the measurement."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """side: rows of a square product; array: bytes of a sum over devices; memory: bytes of a pass over memory, more
    than the caches hold for a device, as a step's arrays are together."""

    side: int
    array: int
    memory: int


CPU, ACCELERATOR = Sizes(512, 2**22, 2**25), Sizes(8192, 2**28, 2**28)


def calibrated(hardware: Hardware, devices: Sequence[Any], dtype: Dtype) -> Hardware:
    """hardware with its efficiencies, the time between kernels, and what a collective over these devices takes, as
    measured on them. Where more than a peak is measured, the peak becomes that. Only links that these devices use are
    measured: those inside of a host where all lie in one, else those between hosts."""
    sizes = CPU if devices[0].platform == "cpu" else ACCELERATOR
    measure = _Measure(Mesh(np.array(devices), (ALL,)), sizes, jnp.bfloat16 if dtype == "bf16" else jnp.float32)
    units, side = hardware.units, sizes.side
    products, memory, gap = measure.products(), measure.memory(), measure.gap()
    products /= shape_efficiency(units, side, side)
    peak = max(hardware.peak(dtype), products)
    bandwidth = max(hardware.bandwidth, memory)
    reached = dataclasses.replace(
        hardware.efficiency,
        products=products / peak,
        memory=memory / bandwidth,
        attention=_attention(hardware, products),
    )
    found = dataclasses.replace(
        hardware,
        tflops=dataclasses.replace(hardware.tflops, **{dtype: peak / 1e12}),
        bandwidth=bandwidth,
        gap=gap,
        efficiency=reached,
    )
    if len(devices) == 1:
        return found
    link = measure.link()
    if len({device.process_index for device in devices}) == 1:
        return dataclasses.replace(found, inside=link, efficiency=dataclasses.replace(reached, inside=1.0))
    return dataclasses.replace(found, between=link, efficiency=dataclasses.replace(reached, between=1.0))


def _attention(hardware: Hardware, products: float) -> float:
    """The attention kernel's efficiency, as far from what the table says as the products' is."""
    stated = hardware.efficiency
    return min(1.0, stated.attention * products / (hardware.peak("bf16") * stated.products))


@dataclasses.dataclass(frozen=True)
class _Measure:
    mesh: Mesh
    sizes: Sizes
    dtype: Any

    def products(self) -> float:
        """FLOP/s of each device."""
        n = self.sizes.side

        def run(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, TURNS, lambda _, y: (x @ y).astype(x.dtype), x)

        seconds = self._seconds(run, jnp.full((n, n), 1 / n, self.dtype))
        return TURNS * 2 * n**3 / seconds

    def memory(self) -> float:
        """Bytes a second of each device, reading and writing."""
        array = jnp.ones(self.sizes.memory // 4, jnp.float32)

        def run(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, TURNS, lambda i, y: lax.optimization_barrier(y * 1.5 + i), x)

        return TURNS * 2 * array.nbytes / self._seconds(run, array)

    def gap(self) -> float:
        """Seconds between two small kernels."""
        turns = 64 * TURNS

        def run(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, turns, lambda i, y: lax.optimization_barrier(y * 1.5 + i), x)

        return self._seconds(run, jnp.ones(64)) / turns

    def link(self) -> Link:
        """By a small sum over all devices, and a large one."""
        p = self.mesh.devices.size

        def run(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, TURNS, lambda _, y: lax.psum(y, ALL) / p, x)

        large = jnp.ones(self.sizes.array // 4, jnp.float32)
        small_time = self._seconds(run, jnp.ones(64)) / TURNS
        rest = max(self._seconds(run, large) / TURNS - small_time, 1e-9)
        return Link(bandwidth=2 * large.nbytes * (p - 1) / p / rest, latency=small_time / (2 * (p - 1)))

    def _seconds(self, function: Callable[[jax.Array], jax.Array], each: jax.Array) -> float:
        """Of one run on all devices at once, each with an array like this."""
        arrays = jnp.broadcast_to(each, (self.mesh.devices.size, *each.shape))
        spec = PartitionSpec(ALL)
        mapped = jax.shard_map(
            lambda x: function(x[0])[None], mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        placed = jax.device_put(arrays, jax.sharding.NamedSharding(self.mesh, spec))
        run = jax.jit(mapped)
        jax.block_until_ready(run(placed))
        best = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            jax.block_until_ready(run(placed))
            best = min(best, time.perf_counter() - began)
        return best
