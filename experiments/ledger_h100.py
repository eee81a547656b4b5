"""The ledger against programs compiled for H100s that are absent, and against the formulas of the papers.

    python experiments/ledger_h100.py [--only TEXT] [--gpu h100]

Predicted are the bytes that a device receives in a step, by kind of collective and mesh axes, from the traced program
alone (jaxgpt explain); found are those in the text that XLA compiles for 4 or 8 GPUs. Every way to split is measured
alone, and in products: GPT-2 124M, and four layers of GPT-3 175B with full recomputation, in bf16, two microbatches
(in a pipeline eight).

Needs no GPU, but the packages that jaxgpt explain --compiled h100 names. Takes about five minutes on two cores.
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
from fractions import Fraction
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin's own start would ask for a driver

import jax

from jaxgpt import RunConfig, preset
from jaxgpt.explained import Explanation, explain
from jaxgpt.model.parameters import parameters
from jaxgpt.sharding.ledger import Total, totals
from jaxgpt.sharding.mesh import parse

RESULT = Path(__file__).parent / "results" / "ledger_h100.json"
MICROBATCHES = 2
IN_A_PIPELINE = 8
ALLOWED = 0.02
"""Largest relative difference, for each kind and axes."""

Settings = dict[str, object]
Received = dict[tuple[str, tuple[str, ...]], Fraction]

ROWS: list[tuple[str, str, Settings]] = [
    ("tensor", "tensor=4", {}),
    ("tensor and sequence", "tensor=4", {"sequence_parallel": True}),
    ("fsdp", "fsdp=8", {}),
    *((f"data, zero {stage}", "data=8", {"zero": stage}) for stage in range(4)),
    ("context, ring", "context=8", {}),
    ("context, gather", "context=8", {"context_attention": "gather"}),
    ("product", "data=2,fsdp=2,tensor=2", {}),
    ("product", "data=2,fsdp=2,tensor=2", {"sequence_parallel": True, "zero": 1}),
    ("product", "context=4,tensor=2", {"sequence_parallel": True}),
    ("pipeline", "pipe=4", {}),
    ("pipeline, zero-bubble", "pipe=4", {"schedule": "zero-bubble"}),
    ("pipeline, interleaved", "pipe=2,tensor=2", {"schedule": "interleaved", "virtual_stages": 2}),
    ("pipeline", "pipe=2,data=2,tensor=2", {"zero": 1}),
    ("pipeline", "pipe=2,fsdp=2,tensor=2", {"sequence_parallel": True}),
    ("pipeline", "pipe=2,context=2,tensor=2", {}),
]
"""Name, mesh and settings of what is measured."""


def models() -> dict[str, RunConfig]:
    """The two models, each with its run."""
    large = preset("gpt3-175b")
    slice_of = dataclasses.replace(large, model=dataclasses.replace(large.model, layers=4))
    return {"GPT-2 124M": preset("gpt2-124m"), "GPT-3 175B, 4 layers": slice_of}


def configuration(base: RunConfig, mesh: str, settings: Settings) -> RunConfig:
    """base on a mesh, its batch just large enough for the microbatches."""
    sizes = parse(mesh)
    assert base.micro_batch is not None
    microbatches = IN_A_PIPELINE if sizes["pipe"] > 1 else MICROBATCHES
    batch = microbatches * base.micro_batch * sizes["data"] * sizes["fsdp"]
    return dataclasses.replace(base, mesh=mesh, dtype="bf16", global_batch=batch, **settings)


def by_formula(config: RunConfig) -> Received:
    """What the papers say that the axis alone must send, bytes a device and step: data and ZeRO (arXiv 1910.02054) with
    fp32 gradients and bf16 weights, vectors whole; tensor (arXiv 1909.08053); {} for what has no simple formula."""
    sizes = {axis: n for axis, n in parse(config.mesh).items() if n > 1}
    if len(sizes) > 1 or config.sequence_parallel or "context" in sizes or "pipe" in sizes:
        return {}
    ((axis, p),) = sizes.items()
    axes, ring = (axis,), Fraction(p - 1, p)
    if axis == "tensor":
        stream = 2 * (config.micro_batch or 0) * config.model.seq * config.model.width
        layer = 4 if config.recompute != "full" else 5  # attention's forward once more
        return {("all-reduce", axes): 2 * ring * stream * MICROBATCHES * (layer * config.model.layers + 2)}
    table = parameters(config.model)
    split = {n: math.prod(p.shape) for n, p in table.items() if "embed" in p.dims}
    blocks = sum(n for name, n in split.items() if name.startswith("blocks."))
    matrices, vectors = sum(split.values()), sum(math.prod(p.shape) for p in table.values()) - sum(split.values())
    zero = 3 if axis == "fsdp" else config.zero
    if zero == 0:
        return {("all-reduce", axes): 2 * ring * 4 * (matrices + vectors)}
    scatters = 1 if zero == 1 else MICROBATCHES
    gathered = matrices if zero < 3 else MICROBATCHES * (2 * blocks + matrices - blocks)
    return {
        ("reduce-scatter", axes): scatters * ring * 4 * matrices,
        ("all-gather", axes): ring * 2 * gathered,
        ("all-reduce", axes): 2 * ring * 4 * vectors,
    }


def differs(one: Fraction, other: Fraction) -> float:
    """Relative to the first."""
    return float(abs(other - one) / one) if one else float(other > 0)


def row(found: Explanation, formula: Received) -> dict[str, object]:
    """Predicted, compiled and by formula, for each kind and axes."""
    assert found.compiled is not None
    predicted, held = totals(found.lines), found.compiled.totals
    lines = []
    for kind, axes in dict.fromkeys([*predicted, *held]):
        ours, theirs = predicted.get((kind, axes), Total()), held.get((kind, axes), Total())
        line: dict[str, object] = {
            "kind": kind,
            "axes": ", ".join(axes),
            "predicted": float(ours.received),
            "compiled": float(theirs.received),
            "difference": differs(ours.received, theirs.received),
        }
        if (kind, axes) in formula:
            line["formula"] = float(formula[kind, axes])
            line["difference from formula"] = differs(formula[kind, axes], ours.received)
        lines.append(line)
    return {"collectives": lines, "largest difference": max(float(str(line["difference"])) for line in lines)}


def main() -> int:
    """Measures, prints, and keeps the result beside this file; 1 where anything differs by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure the rows whose name, mesh or model has this text")
    parser.add_argument("--gpu", default="h100")
    given = parser.parse_args()
    rows = []
    for model, base in models().items():
        for name, mesh, settings in ROWS:
            if not any(given.only in text for text in (name, mesh, model)):
                continue
            began, config = time.monotonic(), configuration(base, mesh, settings)
            measured = row(explain(config, given.gpu), by_formula(config))
            rows.append({"model": model, "name": name, "mesh": mesh, "settings": settings, **measured})
            took = time.monotonic() - began
            worst = float(str(measured["largest difference"]))
            print(f"{model}  {name}  {mesh}  largest difference {100 * worst:.4f} %  {took:.0f} s", flush=True)
            jax.clear_caches()
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "bytes": "received by a device in a step, by the ring algorithms",
        "largest difference": max(float(str(each["largest difference"])) for each in rows),
        "rows": rows,
    }
    if not given.only:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))
    return int(float(str(result["largest difference"])) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
