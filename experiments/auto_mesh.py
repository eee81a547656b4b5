"""The mesh that --mesh auto picks on eight virtual CPU devices, against the measured best of all legal ones.

    python experiments/auto_mesh.py [--only TEXT] [--steps 7]

Three models. All choices but the mesh are pinned, --mesh auto picks as it does for a run, and then one step after
another is measured on every legal mesh, each alone on the devices; those within a quarter of the best, and the one
picked, are measured a second time in turn, a step of each, and that counts. The step of the mesh picked may take at
most 1.1 times the shortest. Kept beside it is what the same model predicts of each mesh, and what the prediction alone,
without trials, would have picked. Takes about twenty minutes on two cores.
"""

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from jaxgpt import ModelConfig, RunConfig
from jaxgpt.planner.choose import auto, here, search
from jaxgpt.planner.legal import FREE
from jaxgpt.planner.plan import Estimate
from jaxgpt.presets import preset
from jaxgpt.sharding import mesh
from jaxgpt.training.console import Console
from jaxgpt.training.program import Program

RESULT = Path(__file__).parent / "results" / "auto_mesh.json"
DEVICES = 8
ALLOWED = 1.1
NEAR = 1.25
"""Meshes whose first measurement is within so many times the shortest are measured again."""

MODELS: dict[str, RunConfig] = {
    "demo": preset("demo"),
    "GPT, large vocabulary": RunConfig(
        model=ModelConfig(layers=2, width=256, heads=8, vocab=8192, seq=64), global_batch=8
    ),
    "GPT, long": RunConfig(model=ModelConfig(layers=4, width=128, heads=4, vocab=256, seq=512), global_batch=8),
}


class Runner:
    """One mesh's step, ready to be run."""

    def __init__(self, config: RunConfig, devices: list[Any]) -> None:
        self.program = Program(config, mesh.build(mesh.parse(config.mesh), devices))
        self.state, draw = self.program.init(), np.random.default_rng(0)
        shape = (config.global_batch, config.model.seq + 1)
        tokens = draw.integers(0, config.model.vocab, shape, dtype=np.int32)
        self.batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        self.step(), self.step()

    def step(self) -> float:
        """Seconds of one."""
        placed = jax.block_until_ready(self.program.place(self.batch))
        began = time.perf_counter()
        self.state, metrics = self.program.step(self.state, placed)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - began


def measured(
    ranked: list[Estimate], picked: str, config: RunConfig, devices: list[Any], steps: int
) -> dict[str, float]:
    """Median seconds of a step on the mesh of each plan, by its text."""
    configs = {mesh.format_mesh(each.plan.sizes): each.plan.apply(config) for each in ranked}
    first = next(iter(configs))
    found = {}
    for text, each in configs.items():
        runner = Runner(each, devices)
        found[text] = min(runner.step() for _ in range(steps))
        print(f"  {text:40} {1e3 * found[text]:8.1f} ms", flush=True)
        del runner
        jax.clear_caches()
        gc.collect()
    near = [text for text in found if found[text] <= NEAR * min(found.values()) or text in (picked, first)]
    runners = {text: Runner(configs[text], devices) for text in near}
    rounds = [{text: runner.step() for text, runner in runners.items()} for _ in range(2 * steps)]
    return found | {text: statistics.median(each[text] for each in rounds) for text in near}


def compared(name: str, steps: int) -> dict[str, Any]:
    """The mesh picked, and every mesh's predicted and measured step."""
    config, devices = MODELS[name], jax.devices()[:DEVICES]
    picked = auto(config, devices, None, Console()).mesh
    jax.clear_caches()
    hardware = here(config, devices, measured=True)
    found = search(config, hardware, DEVICES, set(FREE) - {"mesh"}, top=1000).plans
    times = measured(found, picked, config, devices, steps)
    first, best = mesh.format_mesh(found[0].plan.sizes), min(times, key=times.__getitem__)
    row = {
        "model": name,
        "picked": picked,
        "best": best,
        "times the best": round(times[picked] / times[best], 3),
        "predicted to be the best": first,
        "which is times the best": round(times[first] / times[best], 3),
        "hardware": hardware.to_json(),
        "meshes": [
            {
                "mesh": text,
                "predicted": each.step_seconds,
                "measured": times[text],
                "parts": each.to_json()["time"],
            }
            for each in found
            for text in [mesh.format_mesh(each.plan.sizes)]
        ],
    }
    print(f"{name}: picked {picked}, best {best}, {row['times the best']} times the best", flush=True)
    return row


def main() -> int:
    """Measures, prints, and keeps the result beside this file; 1 where a picked mesh is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure the models whose name has this text")
    parser.add_argument("--steps", type=int, default=7, help="steps of each mesh")
    given = parser.parse_args()
    mesh.prepare_devices(DEVICES)
    rows = [compared(name, given.steps) for name in MODELS if given.only in name]
    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "devices": DEVICES,
        "allowed": ALLOWED,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return int(any(row["times the best"] > ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
