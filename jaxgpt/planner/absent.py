"""Devices that are not there: stand-ins to trace a program for, and GPUs to compile it for.

Tracing asks a device for its number, host and platform alone, so a mesh of any size can be explained anywhere. XLA's
compiler for GPUs takes a description in place of a card, so a program for 4096 H100s compiles without a driver.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from jax.experimental import topologies

from jaxgpt.errors import UserError

HOST = 8
"""GPUs in one host."""


@dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks of a card."""

    name: str
    """As the driver says it."""
    capability: tuple[int, int]
    feature: str
    """XLA's name for the instructions that only this capability has."""
    multiprocessors: int
    lanes: int
    """fp32 units of a multiprocessor."""
    shared: tuple[int, int]
    """Bytes of shared memory: of a multiprocessor, and the most that one block may take."""
    cache: int
    """L2, bytes."""
    clock: float
    """GHz, boosted."""
    memory: int
    """Bytes, as the driver says it."""
    bandwidth: int
    """Of the memory, bytes a second."""
    links: int
    """NVLinks."""


HOPPER: dict[str, Any] = {
    "capability": (9, 0),
    "feature": "ACCELERATED_FEATURES",
    "multiprocessors": 132,
    "lanes": 128,
    "shared": (233472, 232448),
    "cache": 50 << 20,
    "clock": 1.98,
    "links": 18,
}

GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        feature="NONE",
        multiprocessors=108,
        lanes=64,
        shared=(167936, 166912),
        cache=40 << 20,
        clock=1.41,
        memory=85_100_068_864,
        bandwidth=2_039_040_000_000,
        links=12,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        memory=84_942_979_072,
        bandwidth=3_352_320_000_000,
        **HOPPER,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        memory=151_397_597_184,
        bandwidth=4_800_000_000_000,
        **HOPPER,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        feature="ACCELERATED_FEATURES",
        multiprocessors=148,
        lanes=128,
        shared=(233472, 232448),
        cache=132_644_864,
        clock=1.965,
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
        links=18,
    ),
}
"""Multiprocessors, caches, clocks, bandwidths and links from NVIDIA's data sheets and white papers of each generation;
what a block and a multiprocessor may take from the table of compute capabilities in the CUDA programming guide."""


def target(gpu: Gpu) -> str:
    """The text of XLA's GpuTargetConfigProto. Every number must be in it: one that is left out ends the process."""
    major, minor = gpu.capability
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
      shared_memory_per_block: 49152  shared_memory_per_core: {gpu.shared[0]}
      shared_memory_per_block_optin: {gpu.shared[1]}
      core_count: {gpu.multiprocessors}  fpus_per_core: {gpu.lanes}
      block_dim_limit_x: {2**31 - 1}  block_dim_limit_y: 65535  block_dim_limit_z: 65535
      thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
      registers_per_core_limit: 65536  registers_per_block_limit: 65536
      memory_bandwidth: {gpu.bandwidth}  device_memory_size: {gpu.memory}  l2_cache_size: {gpu.cache}
      clock_rate_ghz: {gpu.clock}
      cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {gpu.feature} }}
      device_vendor: "NVIDIA Corporation"  name: "{gpu.name}"
      driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"
      dnn_version: "9.10.0"
      device_interconnect_info {{ active_links: {gpu.links} }}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9  minor: 10  patch: 0 }}
    device_description_str: "{gpu.name}"
    """


def devices(name: str, count: int, flag: str = "--compiled") -> list[Any]:
    """So many absent GPUs of GPUS, host by host, as devices of a mesh that can be compiled for, not run on.

    Raises UserError with the packages to install where the compiler is not whole. JAX must run on CPU
    (JAX_PLATFORMS=cpu), since the plugin's start-up asks for a driver.
    """
    lacking = missing()
    if lacking:
        fix = f"pip install --no-deps {' '.join(lacking)}"
        raise UserError(f"{flag} {name}: what compiles for GPUs that are not here is not installed; {fix}")
    host = count if count <= HOST else math.gcd(count, HOST)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target(GPUS[name]), topology=f"1x{count // host}x{host}"
    )
    return list(topology.devices)


def missing() -> list[str]:
    """The packages without which nothing can be compiled for absent GPUs, as pip takes them.

    XLA's plugin and its runtime in jaxlib's own version, ptxas, and cuDNN: another attention kernel in its place would
    falsify the memory.
    """
    version = metadata.version("jaxlib")
    cuda = next((v for v in ("13", "12") if _installed(f"jax-cuda{v}-plugin")), "12")
    suffix = "-cu12" if cuda == "12" else ""
    needs: dict[str, Callable[[str], bool]] = {
        f"jax-cuda{cuda}-plugin=={version}": _installed,
        f"jax-cuda{cuda}-pjrt=={version}": _installed,
        f"nvidia-cuda-nvcc{suffix}": lambda package: _installed(package) or shutil.which("ptxas") is not None,
        f"nvidia-cudnn-cu{cuda}": _installed,
    }
    return [package for package, there in needs.items() if not there(package.partition("==")[0])]


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


# To trace for


class Nobody:
    """The client of devices that no process has: JAX asks it whose they are, of arrays in a host's memory."""

    def process_index(self) -> int:
        return -1


@dataclass(frozen=True)
class StandIn:
    """A device that a program can be traced for: what a mesh and a memory kind read of one."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    client: Nobody = field(default=Nobody(), repr=False, compare=False)


def stand_ins(count: int, platform: str, kind: str) -> list[StandIn]:
    """So many of them, HOST in a host."""
    return [StandIn(i, i // HOST, platform, kind) for i in range(count)]
