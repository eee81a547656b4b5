"""A checkpoint as fast as the disk: bytes a second against dd with fsync, and how long a save holds up the step.

    python experiments/bench_checkpoint.py [--preset gpt2-124m] [--rounds 7] [--folder .]

What is saved is a model's parameters and both moments in fp32, drawn at random, on one CPU device. In turn: jaxgpt
saves it (from the call until the commit has reached the disk: copy, checksums, files, manifest, rename), dd copies a
file of as many bytes, which lies in memory, to the same disk and waits for fsync. The step is held up by the call of
save alone; against it stands a copy of every array, as jax.device_get makes it where devices do not share the host's
memory. Each round is a pair; what counts is the median of the pairs' ratios. The disk is idle before each: files are
removed and `sync` is waited for.

Needs no GPU, free disk for two checkpoints and memory for four; takes about two minutes for 1.4 GiB.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxgpt.data.workers import cores
from jaxgpt.host_memory import keep
from jaxgpt.model.parameters import parameters
from jaxgpt.presets import preset
from jaxgpt.training.checkpoint import Writer

RESULT = Path(__file__).parent / "results" / "bench_checkpoint.json"
TARGET = 0.6
"""Least share of dd's bytes a second."""
BLOCK = 2**26


def drawn(name: str) -> dict[str, jax.Array]:
    """The state of a preset's model; random bits, so that no disk can make them smaller."""
    draw = np.random.default_rng(0)
    shapes = {n: p.logical for n, p in parameters(preset(name).model).items()}
    return {
        f"{kind}/{n}": jax.device_put(draw.random(shape, np.float32))
        for kind in ("params", "mu", "nu")
        for n, shape in shapes.items()
    }


def saving(folder: Path, state: dict[str, jax.Array]) -> tuple[float, float]:
    """Seconds until a checkpoint is committed, and those in which the step is held up."""
    writer = Writer(folder / "checkpoints", 1)
    began = time.perf_counter()
    writer.save(1, state, {}, {})
    blocked = time.perf_counter() - began
    writer.wait()
    took = time.perf_counter() - began
    writer.close()
    shutil.rmtree(folder / "checkpoints")
    return took, blocked


def copying(state: dict[str, jax.Array]) -> float:
    """Seconds that a copy of every array takes."""
    began = time.perf_counter()
    copies = [np.array(array, copy=True) for array in jax.device_get(state).values()]
    took = time.perf_counter() - began
    assert len(copies) == len(state)
    return took


def dd(source: Path, folder: Path) -> float:
    """Seconds of dd from memory to the disk, with fsync."""
    target = folder / "dd"
    command = ["dd", f"if={source}", f"of={target}", f"bs={BLOCK}", "conv=fsync", "status=none"]
    began = time.perf_counter()
    subprocess.run(command, check=True)
    took = time.perf_counter() - began
    target.unlink()
    return took


def measured(folder: Path, memory: Path, name: str, rounds: int) -> dict[str, Any]:
    """Bytes a second of both and seconds held up, of each pair; the first pair is not counted."""
    state = drawn(name)
    size = sum(array.nbytes for array in state.values())
    source = memory / "source"
    with source.open("wb") as out:
        for array in state.values():
            out.write(np.asarray(array).data)
    pairs = []
    for number in range(rounds + 1):
        saved, blocked = settled(lambda: saving(folder, state))
        copied = settled(lambda: dd(source, folder))
        bare = copying(state)
        if number:
            pairs.append({"save": saved, "dd": copied, "blocked": blocked, "copy": bare})
            print(json.dumps({key: round(value, 3) for key, value in pairs[-1].items()}), flush=True)

    def median(of: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(map(of, pairs)), 3)

    return {
        "bytes": size,
        "arrays": len(state),
        "jaxgpt, MB a second": median(lambda p: size / p["save"] / 1e6),
        "dd with fsync, MB a second": median(lambda p: size / p["dd"] / 1e6),
        "ratio": median(lambda p: p["dd"] / p["save"]),
        "target": TARGET,
        "seconds the step is held up": median(lambda p: p["blocked"]),
        "seconds of a bare copy": median(lambda p: p["copy"]),
        "held up over a bare copy": median(lambda p: p["blocked"] / p["copy"]),
        "pairs": [{key: round(value, 4) for key, value in pair.items()} for pair in pairs],
    }


def settled(work: Callable[[], Any]) -> Any:
    """What work returns, begun when the disk has nothing left to write."""
    os.sync()
    return work()


def main() -> int:
    """Measures, prints, and keeps the result beside this file; 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-124m", help="whose model's state is saved")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where dd's source lies")
    given = parser.parse_args()
    keep()
    with TemporaryDirectory(dir=given.folder) as disk, TemporaryDirectory(dir=given.memory) as memory:
        found = measured(Path(disk), Path(memory), given.preset, given.rounds)
    print(json.dumps({key: value for key, value in found.items() if key != "pairs"}, indent=1))
    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "cores": cores(),
        "versions": {n: m.__version__ for n, m in (("jax", jax), ("numpy", np))}
        | {"tensorstore": getattr(tensorstore, "__version__", "unknown"), "python": platform.python_version()},
        "results": found,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return int(found["ratio"] < TARGET)


if __name__ == "__main__":
    sys.exit(main())
