"""Memory predicted for a plan against the step that is compiled for as many absent H100s.

    python experiments/plan_memory.py [--only TEXT] [--rest | --predict]

Models from GPT-2 124M to GPT-3 175B, every mesh axis, every schedule, ZeRO stage and kind of recomputation. Peak bytes
of a device: what the compiler says of the whole step, state and batch included. --predict predicts again what was
compiled, and compiles nothing.

Needs no GPU, but the packages that jaxgpt explain --compiled h100 names. Takes about fifteen minutes on two cores.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin's own start would ask for a driver

import jax

from jaxgpt import RunConfig, preset
from jaxgpt.planner import absent
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import find
from jaxgpt.planner.plan import Plan
from jaxgpt.sharding import mesh
from jaxgpt.training.program import Program

RESULT = Path(__file__).parent / "results" / "plan_memory.json"
GPU = "h100"
EACH, MEAN = 0.15, 0.07
"""Largest relative error of a plan, and of all on average."""

Row = dict[str, Any]
Settings = dict[str, Any]

SMALL, MEDIUM, LARGE, HUGE = "gpt2-124m", "gpt3-1.3b", "gpt3-6.7b", "gpt3-175b"
PLANS: list[tuple[str, str, int, int, Settings]] = [
    (SMALL, "data=8", 16, 1, {}),
    (SMALL, "data=8", 4, 4, {"zero": 1}),
    (SMALL, "data=8", 4, 4, {"zero": 2}),
    (SMALL, "data=8", 4, 4, {"zero": 3}),
    (SMALL, "data=8", 16, 2, {"recompute": "selective"}),
    (SMALL, "data=8", 32, 2, {"recompute": "full"}),
    (SMALL, "fsdp=8", 8, 2, {}),
    (SMALL, "tensor=4", 8, 2, {}),
    (SMALL, "tensor=4", 8, 2, {"sequence_parallel": True}),
    (SMALL, "context=8", 16, 2, {"context_attention": "ring"}),
    (SMALL, "context=4", 8, 2, {"context_attention": "gather"}),
    (SMALL, "pipe=4", 8, 16, {}),
    (MEDIUM, "data=8", 2, 4, {"recompute": "selective"}),
    (MEDIUM, "fsdp=8", 4, 2, {}),
    (MEDIUM, "data=2,fsdp=2,tensor=2", 4, 2, {"zero": 1, "sequence_parallel": True}),
    (MEDIUM, "context=4,tensor=2", 4, 2, {"recompute": "full", "context_attention": "ring"}),
    (MEDIUM, "pipe=2,fsdp=2,tensor=2", 2, 8, {"recompute": "selective"}),
    (MEDIUM, "pipe=2,context=2,tensor=2", 2, 8, {}),
    (LARGE, "fsdp=8", 2, 2, {"recompute": "full"}),
    (LARGE, "tensor=8", 2, 4, {"sequence_parallel": True, "recompute": "selective"}),
    (LARGE, "data=8,tensor=4", 1, 8, {"zero": 1}),
    (LARGE, "pipe=8", 1, 16, {}),
    (LARGE, "pipe=8", 2, 32, {"recompute": "selective"}),
    (LARGE, "pipe=8", 1, 16, {"schedule": "interleaved", "virtual_stages": 2}),
    (LARGE, "pipe=4,tensor=2", 2, 16, {"schedule": "interleaved", "virtual_stages": 4, "recompute": "full"}),
    (LARGE, "pipe=8", 1, 16, {"schedule": "gpipe", "recompute": "full"}),
    (LARGE, "pipe=8", 1, 16, {"schedule": "zero-bubble", "recompute": "none"}),
    (LARGE, "pipe=8", 1, 16, {"schedule": "zero-bubble", "recompute": "full"}),
    (LARGE, "pipe=4,tensor=2", 1, 16, {"schedule": "zero-bubble", "recompute": "selective"}),
    (HUGE, "pipe=8,tensor=8", 1, 32, {"recompute": "full"}),
    (HUGE, "pipe=8,tensor=8", 1, 32, {"recompute": "full", "sequence_parallel": True}),
    (HUGE, "pipe=16,data=2,tensor=8", 1, 64, {"recompute": "selective", "sequence_parallel": True, "zero": 1}),
    (HUGE, "pipe=8,tensor=8", 1, 32, {"recompute": "full", "schedule": "interleaved", "virtual_stages": 3}),
    (HUGE, "fsdp=64,tensor=8", 1, 2, {"recompute": "full", "sequence_parallel": True}),
    (HUGE, "data=32,tensor=8", 1, 2, {"recompute": "full", "zero": 3}),
    (LARGE, "pipe=6", 1, 12, {}),
    (LARGE, "pipe=4,data=2", 1, 16, {"schedule": "gpipe", "recompute": "selective", "zero": 1}),
    (SMALL, "fsdp=2,tensor=2", 4, 2, {"offload": "optimizer"}),
    (SMALL, "data=8", 16, 2, {"recompute": "full:4"}),
    (LARGE, "pipe=6", 1, 12, {"recompute": "full:5"}),
    (LARGE, "pipe=8", 1, 16, {"schedule": "interleaved", "virtual_stages": 2, "recompute": "selective:1"}),
    (LARGE, "pipe=8", 1, 16, {"schedule": "zero-bubble", "recompute": "full:2"}),
    ("smollm2-135m", "data=8", 8, 2, {"zero": 1}),
    ("smollm2-135m", "data=2,tensor=3", 8, 2, {"recompute": "selective"}),
    ("smollm2-135m", "pipe=3", 4, 9, {"schedule": "zero-bubble"}),
]
"""Model, mesh, microbatch of a device, microbatches, and the rest."""


def configurations() -> dict[str, RunConfig]:
    """The runs by name; a run's batch is as large as its microbatches."""
    found = {}
    for model, axes, micro, count, settings in PLANS:
        sizes = mesh.parse(axes)
        batch = micro * count * sizes["data"] * sizes["fsdp"]
        base = dataclasses.replace(preset(model), mesh=axes, dtype="bf16", global_batch=batch, micro_batch=micro)
        config = dataclasses.replace(base, **{"recompute": "none", **settings})
        said = ", ".join(f"{field} {value}" for field, value in settings.items())
        found[f"{model} {axes}, {count} x {micro}" + (f", {said}" if said else "")] = config
    return found


def compiled(config: RunConfig) -> Row:
    """The compiler's bytes on one device."""
    sizes = mesh.parse(config.mesh)
    mesh.check(config, sizes)
    program = Program(config, mesh.build(sizes, absent.devices(GPU, math.prod(sizes.values()))))
    found = program.compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        # arguments in the host's memory are counted into the peak, though the device does not hold them
        "peak": found.peak_memory_in_bytes - found.host_argument_size_in_bytes,
        "host": found.host_argument_size_in_bytes + found.host_temp_size_in_bytes,
    }


def predicted(config: RunConfig) -> Row:
    """The model's, by kind."""
    plan = Plan.of(config, mesh.parse(config.mesh), GPU)
    found = estimate(config.model, plan, find(GPU), config.global_batch)
    return {
        "predicted": found.peak_bytes,
        "kinds": dataclasses.asdict(found.memory),
        "fits": found.fits,
        "choices": plan.to_json(),
        "batch": config.global_batch,
    }


def compared(config: RunConfig, held: Row) -> Row:
    row = {"compiled": held, **predicted(config)}
    return row | {"error": row["predicted"] / held["peak"] - 1}


def main() -> int:
    """Measures, prints, and keeps the result beside this file; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="compile the plans whose model, mesh or settings have this text")
    parser.add_argument("--rest", action="store_true", help="compile the plans alone that have not been compiled yet")
    parser.add_argument("--predict", action="store_true", help="compile nothing, predict what was compiled again")
    given = parser.parse_args()
    before = json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else []
    known = {row["plan"]: row for row in before if row["plan"] in configurations()}
    for name, config in configurations().items():
        if given.predict or given.only not in name or (given.rest and name in known):
            if name not in known:
                continue
            held = known[name]["compiled"]
        else:
            began = time.monotonic()
            held = compiled(config)
            print(f"compiled in {time.monotonic() - began:.0f} s:", end=" ")
            jax.clear_caches()
        known[name] = {"plan": name, "model": name.split()[0], **compared(config, held)}
        _print(known[name])
        _keep(list(known.values()))
    return _judged(list(known.values()))


def _print(row: Row) -> None:
    gib = {kind: round(n / 2**30, 2) for kind, n in row["kinds"].items()}
    peak, said = row["compiled"]["peak"] / 2**30, row["predicted"] / 2**30
    print(f"{row['plan']}: compiled {peak:.2f} GiB, predicted {said:.2f} ({row['error']:+.1%}) {gib}", flush=True)


def _keep(rows: list[Row]) -> None:
    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "gpu": GPU,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")


def _judged(rows: list[Row]) -> int:
    """Prints errors, and plans that fit by the model and not by the compiler."""
    errors = [abs(row["error"]) for row in rows]
    capacity = find(GPU).memory
    wrong = [row["plan"] for row in rows if row["fits"] and row["compiled"]["peak"] > capacity]
    mean = sum(errors) / len(errors)
    print(f"{len(rows)} plans: largest error {max(errors):.1%}, mean {mean:.1%}; said to fit and does not: {wrong}")
    return int(max(errors) > EACH or mean > MEAN or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
