"""One device against every mesh: loss, gradient norm, every gradient, and every parameter after five steps."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from quickly import unoptimized
from tiny import FAMILIES, GPT, batches, run_config

from jaxgpt.config import RunConfig
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training import parity
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core

MESHES = (
    "data=8",
    "fsdp=8",
    "tensor=8",
    "data=2,fsdp=4",
    "data=2,tensor=4",
    "fsdp=2,tensor=4",
    "data=2,fsdp=2,tensor=2",
)
OPPOSITES = (
    (("gpt", True, 0.0), ("llama", False, 0.1)),
    (("gpt", False, 0.1), ("llama", True, 0.0)),
    (("gpt", True, 0.1), ("llama", False, 0.0)),
)
"""(family, tied, dropout) and its opposite: with both on every mesh, each value meets each mesh and each other."""
CASES = [
    (mesh, {}, *case, accumulated)
    for number, mesh in enumerate(MESHES)
    for case, accumulated in zip(OPPOSITES[number % 3], ((1, 4), (4, 1))[number % 2], strict=True)
]
SPLITS: tuple[tuple[str, dict[str, object]], ...] = (
    ("tensor=4", {"sequence_parallel": True}),
    ("data=4", {"zero": 1}),
    ("data=2,fsdp=2", {"zero": 2}),
    ("data=4,tensor=2", {"zero": 3, "recompute": "full:1"}),
    ("context=4", {}),
    ("data=2,context=2,tensor=2", {"sequence_parallel": True, "zero": 1}),
    ("fsdp=2,context=2,tensor=2", {"context_attention": "gather", "recompute": "selective"}),
    ("data=2,fsdp=2,tensor=2", {"sequence_parallel": True, "zero": 2, "recompute": "full"}),
)
CASES += [
    (mesh, split, *OPPOSITES[number % 3][number // 3 % 2], (4, 1)[number % 2])
    for number, (mesh, split) in enumerate(SPLITS)
]
OPTIMIZED = "data=2,fsdp=2,tensor=2"
"""The mesh whose programs are compiled with all optimizations, as users' are; for every mesh they take too long."""


def configuration(family: str, tied: bool, dropout: float) -> RunConfig:
    model = dataclasses.replace(FAMILIES[family], tied=tied, dropout=dropout)
    return run_config(model, clip=0.25)  # about half of the gradients' norm, so that they are clipped


@cache
def on_one_device(family: str, tied: bool, dropout: float) -> parity.Trace:
    config = configuration(family, tied, dropout)
    with unoptimized():
        return parity.trace(config, "data=1", batches(config, 5))


def shares(mesh: str) -> int:
    sizes = dict(item.split("=") for item in mesh.split(","))
    return int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1))


@pytest.mark.parametrize(("mesh", "split", "family", "tied", "dropout", "microbatches"), CASES)
def test_a_mesh_computes_what_one_device_does(
    mesh: str, split: dict[str, object], family: str, tied: bool, dropout: float, microbatches: int
) -> None:
    config = configuration(family, tied, dropout)
    micro = config.global_batch // shares(mesh) // microbatches
    with unoptimized(mesh != OPTIMIZED):
        found = parity.trace(dataclasses.replace(config, micro_batch=micro, **split), mesh, batches(config, 5))
    wrong = [d for d in parity.differences(on_one_device(family, tied, dropout), found) if not d.holds]
    assert not wrong


def test_the_trace_moves_every_parameter() -> None:
    """Else parity would compare what no step has touched."""
    config = configuration("gpt", False, 0.1)
    moved = on_one_device("gpt", False, 0.1)
    start = Program(config, build(parse("data=1"), jax.devices()[:1])).init()["params"]
    still = [n for n, p in moved.params.items() if np.array_equal(p, np.asarray(start[n])) and "key.bias" not in n]
    assert not still


def test_in_bf16_sums_over_tokens_are_not_bf16s() -> None:
    """Such a sum stands still once it is 256 times what is added to it: biases would be off by a tenth."""
    config = run_config(dataclasses.replace(GPT, layers=1), global_batch=64)
    data = batches(config, 1, masked=0.0)
    with unoptimized():
        exact, found = (
            parity.trace(dataclasses.replace(config, dtype=dtype), "data=1", data).gradients
            for dtype in ("fp32", "bf16")
        )
    off = {n: np.sqrt(np.mean((found[n] - g) ** 2) / np.mean(g**2)) for n, g in exact.items() if "key.bias" not in n}
    assert max(off.values()) < 0.02, off
