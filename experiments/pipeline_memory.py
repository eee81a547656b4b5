"""Memory of pipelines, compiled for eight H100s that are absent: a GPT-3 of 6.7B parameters on pipe=8.

    python experiments/pipeline_memory.py [--mesh pipe=8] [--gpu h100]

Temporary bytes a device of the compiled step, for every schedule at several numbers of microbatches, without
recomputation; beside them the ring of residuals that the schedule's table names, from the traced program. 1F1B, the
zero-bubble schedule and interleaving must not grow with the number of microbatches; GPipe must, by the residuals of
each.

Needs no GPU, but the packages that jaxgpt explain --compiled h100 names. Takes about two minutes on two cores.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin's own start would ask for a driver

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxgpt import RunConfig, preset
from jaxgpt.pipeline.buffers import plan
from jaxgpt.planner import absent
from jaxgpt.sharding import mesh
from jaxgpt.sharding.jaxprs import Scan, inner, live, scan_of
from jaxgpt.training.program import Program

RESULT = Path(__file__).parent / "results" / "pipeline_memory.json"
CASES: list[tuple[str, int, int]] = [
    ("1f1b", 1, 16),
    ("1f1b", 1, 32),
    ("1f1b", 1, 64),
    ("interleaved", 2, 16),
    ("interleaved", 2, 64),
    ("zero-bubble", 1, 16),
    ("zero-bubble", 1, 64),
    ("gpipe", 1, 8),
    ("gpipe", 1, 16),
]
"""Schedule, virtual stages, microbatches."""
ALLOWED = 1.02
"""Times its memory at the fewest microbatches."""


def residual_bytes(program: Program) -> int:
    """Bytes of one place of the ring of residuals, from the types of the traced loop's carry: what lies in rings of
    that many places, in all rings of the largest kind."""
    places = plan(program.schedule).residuals
    ticks = len(program.schedule.operation)
    equation, scan = next(each for each in scans(live(program.traced.jaxpr)) if each[1].length == ticks)
    types: list[Any] = [v.aval for v in equation.invars[scan.consts : scan.consts + scan.carry]]
    rings = [t for t in types if t.ndim > 3 and t.shape[0] == places]
    return sum(math.prod(t.shape[1:]) * t.dtype.itemsize for t in rings)


def scans(program: Jaxpr) -> Iterator[tuple[JaxprEqn, Scan]]:
    """The loops of a program, the outermost first."""
    for equation in program.eqns:
        if scan := scan_of(equation):
            yield equation, scan
        for part, _ in inner(equation):
            yield from scans(part)


def measured(config: RunConfig, devices: list[Any]) -> dict[str, Any]:
    """A compiled step's bytes on one device."""
    program = Program(config, mesh.build(mesh.parse(config.mesh), devices))
    found, places, place = program.compiled.memory_analysis(), plan(program.schedule).residuals, residual_bytes(program)
    return {
        "schedule": config.schedule,
        "virtual stages": config.virtual_stages,
        "microbatches": program.schedule.microbatches,
        "temporary": found.temp_size_in_bytes,
        "state and batch": found.argument_size_in_bytes,
        "places of the ring of residuals": places,
        "bytes of a place": place,
        "temporary without the ring": found.temp_size_in_bytes - places * place,
    }


def main() -> int:
    """Measures, prints, and keeps the result beside this file; 1 where memory grows that must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="pipe=8")
    parser.add_argument("--gpu", default="h100")
    given = parser.parse_args()
    sizes = mesh.parse(given.mesh)
    devices = absent.devices(given.gpu, math.prod(sizes.values()))
    base = dataclasses.replace(preset("gpt3-6.7b"), mesh=given.mesh, dtype="bf16", micro_batch=1, recompute="none")
    rows, first, grown = [], {}, []
    for name, chunks, count in CASES:
        batch = count * sizes["data"] * sizes["fsdp"]
        config = dataclasses.replace(base, schedule=name, virtual_stages=chunks, global_batch=batch)
        row = measured(config, devices)
        rows.append(row | {"times its fewest": row["temporary"] / first.setdefault(name, row["temporary"])})
        print(json.dumps(rows[-1]), flush=True)
        if name != "gpipe" and rows[-1]["times its fewest"] > ALLOWED:
            grown.append(f"{name} at {count} microbatches")
    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "model": "gpt3-6.7b",
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    print("grown: " + ", ".join(grown) if grown else "nothing grows but GPipe")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
