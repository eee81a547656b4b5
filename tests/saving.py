"""One of two processes that save and open checkpoints together; called as a program: saving.py INDEX PORT FOLDER.

What it found is its last line, as JSON.
"""

import json
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import UserError
from jaxgpt.training import checkpoint, zarr
from jaxgpt.training.checkpoint import Writer
from jaxgpt.training.resume import restore_last, unflatten

COUNT = 2
LAYERS = (3, 0, 4, -1, 1, 5, 2, -1)
"""Where each row of what is split as the layers of a pipeline are is stored."""
SPLITS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "params/wte": ((64, 96), (("a", "b"), None)),
    "params/blocks.up": ((8, 16, 96), ("a", None, "b")),
    "params/blocks.down": ((6, 96, 16), (None, ("b", "a"), None)),
    "params/norm": ((7,), (None,)),
    "mu/wte": ((64, 96), (None, "b")),
    "step": ((), ()),
}
LOGICAL = {"params/wte": (17, 96), "mu/wte": (17, 96), "params/blocks.up": (6, 16, 96)}
ROWS = {"params/blocks.up": LAYERS}


def values(seed: int) -> dict[str, np.ndarray]:
    """Whole arrays as devices hold them, zero where nothing is stored."""
    draw = np.random.default_rng(seed)
    found = {name: np.asarray(draw.normal(size=shape), np.float32) for name, (shape, _) in SPLITS.items()}
    for name in ("params/wte", "mu/wte"):
        found[name][17:] = 0
    found["params/blocks.up"][[row for row, place in enumerate(LAYERS) if place < 0]] = 0
    return found


def shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, PartitionSpec(*split)) for name, (_, split) in SPLITS.items()}


def state(mesh: Mesh, seed: int) -> dict[str, jax.Array]:
    whole, placed = values(seed), shardings(mesh)
    return {n: jax.make_array_from_callback(a.shape, placed[n], lambda i, a=a: a[i]) for n, a in whole.items()}


def targets(mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    placed = shardings(mesh)
    return {n: jax.ShapeDtypeStruct(s, np.float32, sharding=placed[n]) for n, (s, _) in SPLITS.items()}


class Both:
    """Two processes that hear of each other through JAX's coordinator."""

    def __init__(self) -> None:
        self.index, self.count = distributed.global_state.process_id, COUNT
        self._uses: Counter[str] = Counter()

    def exchange(self, name: str, said: str, timeout: float) -> list[str]:
        self._uses[name] += 1
        key, client = f"{name}/{self._uses[name]}", distributed.global_state.client
        client.key_value_set(f"{key}/{self.index}", said or " ")
        wait = int(1e3 * min(timeout, 60))
        return [client.blocking_key_value_get(f"{key}/{i}", wait).strip() for i in range(COUNT)]


def same(found: dict[str, jax.Array], seed: int) -> bool:
    """Whether this process's parts are those of the values."""
    whole = values(seed)
    return all(np.array_equal(s.data, whole[n][s.index]) for n, a in found.items() for s in a.addressable_shards)


def bytes_read() -> int:
    """By tensorstore, from files, so far."""
    name = "/tensorstore/kvstore/file/bytes_read"
    return sum(
        value["value"] for metric in ts.experimental_collect_matching_metrics(name) for value in metric["values"]
    )


def attempt(writer: Writer, step: int, arrays: dict[str, jax.Array]) -> str:
    """What a save says that fails; empty where it does not."""
    try:
        writer.save(step, arrays, LOGICAL, {}, ROWS)
        writer.wait()
    except UserError as error:
        return str(error)
    return ""


def main(index: int, port: int, folder: Path) -> dict[str, Any]:
    jax.distributed.initialize(f"localhost:{port}", COUNT, index)
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    both = Both()
    zarr.FILE_BYTES, zarr.CHUNK_BYTES = 4096, 512
    writer = Writer(folder, 9, group=both)
    said = [attempt(writer, 7, state(mesh, 7))]
    before = bytes_read()
    found: dict[str, Any] = {
        "same": same(checkpoint.restore(folder, 7, targets(mesh), LOGICAL, ROWS), 7),
        "read": bytes_read() - before,
    }
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if index == 1:  # as on a disk that is full for one of them
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    said.append(attempt(writer, 8, state(mesh, 8)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said.append(attempt(writer, 9, state(mesh, 9)))
    if index == 0:  # of the part that process 1 alone reads
        (folder / "step-00000009/arrays/params/blocks.up/c/2/0/0").unlink()
    both.exchange("harmed", "", 60)
    tree, logical, lines = unflatten(targets(mesh)), {n.partition("/")[2]: s for n, s in LOGICAL.items()}, []
    restored = restore_last(folder, tree, logical, lines.append, {"blocks.up": LAYERS}, group=both)
    assert restored is not None
    found |= {"said": said, "taken": restored.step, "damaged": restored.damaged, "lines": lines}
    writer.close()
    jax.distributed.shutdown()
    return found


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
