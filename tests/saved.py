"""A small state that tests of checkpoints save and open: padded, split, replicated, half precision, a scalar."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.training.checkpoint import Writer

VOCAB, PADDED, WIDTH = 17, 64, 16
SPLITS = {
    "params/wte": ("tensor", "fsdp"),
    "params/blocks.weight": (None, "fsdp", "tensor"),
    "mu/blocks.weight": (None, ("data", "fsdp"), "tensor"),
    "params/norm": (None,),
    "half": ("fsdp", None),
    "step": (),
}
LOGICAL = {"params/wte": (VOCAB, WIDTH)}


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    sizes = (data, fsdp, tensor)
    devices = jax.devices()[: data * fsdp * tensor]
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), devices=devices)


def sharding(name: str, on: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(on, PartitionSpec(*SPLITS[name]))


def values(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    wte = np.zeros((PADDED, WIDTH), np.float32)
    wte[:VOCAB] = draw.normal(size=(VOCAB, WIDTH))
    return {
        "params/wte": wte,
        "params/blocks.weight": draw.normal(size=(3, WIDTH, 24)).astype(np.float32),
        "mu/blocks.weight": draw.normal(size=(3, WIDTH, 24)).astype(np.float32),
        "params/norm": np.array([0.0, -0.0, np.inf, np.nan, 1e-45 * (seed + 1)], np.float32),
        "half": draw.normal(size=(8, 5)).astype(jnp.bfloat16),
        "step": np.array(7 + seed, np.int32),
    }


def state(on: jax.sharding.Mesh, seed: int = 0) -> dict[str, jax.Array]:
    return {name: jax.device_put(value, sharding(name, on)) for name, value in values(seed).items()}


def targets(on: jax.sharding.Mesh, padded: int = PADDED) -> dict[str, jax.ShapeDtypeStruct]:
    like = values()
    shapes = {name: array.shape for name, array in like.items()} | {"params/wte": (padded, WIDTH)}
    return {
        name: jax.ShapeDtypeStruct(shapes[name], array.dtype, sharding=sharding(name, on))
        for name, array in like.items()
    }


def save(folder: Path, step: int, arrays: dict[str, jax.Array], keep: int = 9, loss: float | None = None) -> None:
    writer = Writer(folder, keep)
    writer.save(step, arrays, LOGICAL, {"samples": step * 4}, loss=loss)
    writer.close()


def assert_same(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


def files(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.rglob("*") if entry.is_file())
