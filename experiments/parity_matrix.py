"""Every way to split a model against one device: loss, gradient norm, every gradient and every parameter after five
steps in fp32, on meshes of 2, 4 and 8 devices.

    python experiments/parity_matrix.py [--again] [--only TEXT] [--optimized]

Each mesh runs both model families; tied and untied, dropout, accumulation and recomputation change places, so that each
meets every axis. A fifth of the targets is not counted and an eighth of the samples has none, so that microbatches and
devices differ in tokens, and some have none; gradients are clipped. Rows that the result has already are not run again.
Most of the time is the compiler's: without --optimized it leaves out optimizations that move no number between devices.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt import ModelConfig, RunConfig, use_devices
from jaxgpt.sharding import mesh
from jaxgpt.training import parity

HERE = Path(__file__).parent / "results"
RESULT, TABLE = HERE / "parity_matrix.json", HERE / "parity_matrix.md"
STEPS = 5

GPT = ModelConfig(layers=2, width=32, heads=8, vocab=127, seq=16)
LLAMA = dataclasses.replace(
    GPT,
    kv_heads=4,
    mlp_width=64,
    positions="rotary",
    norm="rmsnorm",
    norm_bias=False,
    activation="silu",
    gated=True,
    qkv_bias=False,
    attention_bias=False,
    mlp_bias=False,
)
MIXED = dataclasses.replace(
    LLAMA,
    kv_heads=2,
    head_width=8,
    qk_norm=True,
    parallel_residual=True,
    rope_fraction=0.5,
    qkv_bias=True,
    norm_bias=True,
)
"""What neither has: norms on queries and keys, parallel residual, partial rotation, heads wider than the model."""
FAMILIES = {"gpt": GPT, "llama": LLAMA, "mixed": MIXED}

SP: dict[str, Any] = {"sequence_parallel": True}
GATHER: dict[str, Any] = {"context_attention": "gather"}
SPLITS: list[tuple[str, dict[str, Any]]] = [
    # 2 devices
    ("data=2", {}),
    ("data=2", {"zero": 1}),
    ("data=2", {"zero": 2}),
    ("data=2", {"zero": 3}),
    ("fsdp=2", {}),
    ("context=2", {}),
    ("context=2", GATHER),
    ("tensor=2", {}),
    ("tensor=2", SP),
    # 4 devices
    ("data=4", {}),
    ("data=4", {"zero": 1}),
    ("fsdp=4", {}),
    ("context=4", {}),
    ("context=4", GATHER),
    ("tensor=4", {}),
    ("tensor=4", SP),
    ("data=2,fsdp=2", {}),
    ("data=2,fsdp=2", {"zero": 2}),
    ("data=2,context=2", {"zero": 3}),
    ("data=2,tensor=2", {"zero": 1, **SP}),
    ("fsdp=2,context=2", {}),
    ("fsdp=2,tensor=2", {}),
    ("context=2,tensor=2", SP),
    # 8 devices
    ("data=8", {}),
    ("data=8", {"zero": 1}),
    ("data=8", {"zero": 2}),
    ("data=8", {"zero": 3}),
    ("fsdp=8", {}),
    ("context=8", {}),
    ("context=8", GATHER),
    ("tensor=8", {}),
    ("tensor=8", SP),
    ("data=4,fsdp=2", {"zero": 2}),
    ("data=2,fsdp=4", {"zero": 1}),
    ("data=4,context=2", {"zero": 2}),
    ("data=2,context=4", GATHER),
    ("data=4,tensor=2", {"zero": 1, **SP}),
    ("data=2,tensor=4", {"zero": 3}),
    ("fsdp=4,context=2", {}),
    ("fsdp=2,context=4", GATHER),
    ("fsdp=4,tensor=2", SP),
    ("fsdp=2,tensor=4", {}),
    ("context=4,tensor=2", {}),
    ("context=2,tensor=4", {**SP, **GATHER}),
    ("data=2,fsdp=2,context=2", {"zero": 1}),
    ("data=2,fsdp=2,tensor=2", {}),
    ("data=2,fsdp=2,tensor=2", {"zero": 2, **SP}),
    ("data=2,fsdp=2,tensor=2", {"zero": 3}),
    ("data=2,context=2,tensor=2", {"zero": 3, **SP}),
    ("fsdp=2,context=2,tensor=2", {**SP, **GATHER}),
    # rows of the layout changed by hand
    ("tensor=4", {"layout": "mlp=none"}),
    ("tensor=4", {"layout": "vocab=none,heads=none"}),
    ("data=2,fsdp=2,tensor=2", {"layout": "embed=data,seq=tensor"}),
]
MIXED_SPLITS: list[tuple[str, dict[str, Any]]] = [
    ("data=2,tensor=4", {"zero": 1, **SP}),
    ("context=2,tensor=2", SP),
    ("fsdp=2,context=4", {}),
    ("tensor=8", {}),
]


PIPES: list[tuple[str, dict[str, Any], int]] = [
    ("pipe=2", {}, 7),
    ("pipe=4", {}, 30),
    ("pipe=8", {}, 16),
    ("pipe=2,data=2", {}, 4),
    ("pipe=2,data=4", {"zero": 1}, 7),
    ("pipe=4,data=2", {"zero": 2}, 8),
    ("pipe=2,fsdp=4", {}, 4),
    ("pipe=4,fsdp=2", {}, 9),
    ("pipe=2,tensor=2", {}, 7),
    ("pipe=4,tensor=2", SP, 8),
    ("pipe=2,context=2", {}, 4),
    ("pipe=2,context=2,tensor=2", SP, 7),
    ("pipe=2,data=2,tensor=2", {"zero": 1}, 4),
    ("pipe=2,data=2,fsdp=2", {"zero": 3}, 4),
]
"""Mesh, split and layers of pipelines; each with every schedule."""
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
COUNTS = (1, 3, 6, 12, 4)
"""Microbatches: one, fewer and more than the stages, multiples of them and not."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    mesh: str
    family: str
    tied: bool
    dropout: float
    microbatches: int
    recompute: str
    split: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    batch: int = 32

    @property
    def name(self) -> str:
        """What identifies it in the result."""
        split = " ".join(f"{n}={v}" for n, v in self.split.items())
        return f"{self.mesh} [{split}] {self.family} " + " ".join(
            f"{n}={getattr(self, n)}" for n in ("tied", "dropout", "microbatches", "recompute", "layers")
        )

    def one_device(self) -> RunConfig:
        """The configuration without its mesh."""
        family = FAMILIES[self.family]
        model = dataclasses.replace(family, tied=self.tied, dropout=self.dropout, layers=self.layers)
        return RunConfig(model=model, global_batch=self.batch, steps=10, warmup=2, lr=1e-2, epsilon=1e-3, clip=0.25)

    def config(self) -> RunConfig:
        """The configuration for its mesh."""
        sizes = mesh.parse(self.mesh)
        micro = self.batch // (sizes["data"] * sizes["fsdp"] * self.microbatches)
        return dataclasses.replace(self.one_device(), micro_batch=micro, recompute=self.recompute, **self.split)


def rows() -> Iterator[Row]:
    """Each split with one family and then with the other, with opposite choices in all else; then the mixed one."""
    for second in (False, True):
        for number, (where, split) in enumerate(SPLITS):
            tied, dropping, many = (bool(number >> bit & 1) for bit in (1, 2, 3))
            same = (number % 2 == 0) is not second
            family = "gpt" if same else "llama"
            yield Row(
                mesh=where,
                family=family,
                tied=tied is same,
                dropout=0.1 if dropping is same else 0.0,
                microbatches=4 if many is same else 1,
                recompute=("none", "selective", "full")[(number + (not same)) % 3],
                split=split,
            )
    for number, (where, split) in enumerate(MIXED_SPLITS):
        yield Row(where, "mixed", number % 2 == 0, 0.1, (1, 4)[number // 2], ("none", "selective")[number % 2], split)
    yield from pipelines()


def pipelines() -> Iterator[Row]:
    """Every mesh of PIPES with every schedule; all else changes places."""
    for number, ((where, split, layers), name) in enumerate((each, name) for each in PIPES for name in SCHEDULES):
        sizes = mesh.parse(where)
        stages, share = sizes["pipe"], 24 // (sizes["data"] * sizes["fsdp"])
        chunks = 2 if name == "interleaved" else 1
        fitting = [m for m in COUNTS if share % m == 0 and (chunks == 1 or m % stages == 0)] or [stages]
        if share % fitting[0]:
            continue  # interleaved over more stages than there are sequences
        yield Row(
            mesh=where,
            family=("gpt", "llama")[(number + number // 4) % 2],
            tied=number % 3 != 0,
            dropout=0.1 * (number // 4 % 2),
            microbatches=fitting[number % len(fitting)],
            recompute=("none", "selective", "full")[number // 2 % 3],
            split={**split, "schedule": name, "virtual_stages": chunks},
            layers=max(layers, stages * chunks),
            batch=24,
        )


@cache
def batches(count: int) -> list[dict[str, np.ndarray]]:
    """Random tokens, and targets of which some are not counted."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        tokens = rng.integers(0, GPT.vocab, (count, GPT.seq + 1)).astype(np.int32)
        targets = np.where(rng.random((count, GPT.seq)) < 0.2, -1, tokens[:, 1:]).astype(np.int32)
        targets[: count // 8] = -1
        found.append({"inputs": tokens[:, :-1].copy(), "targets": targets})
    return found


@cache
def on_one_device(config: RunConfig) -> parity.Trace:
    """What one device computes, for all rows of this configuration."""
    return parity.trace(config, "data=1", batches(config.global_batch))


def compared(row: Row, optimized: bool) -> dict[str, Any]:
    """The row's result."""
    began = time.monotonic()
    found = parity.differences(
        on_one_device(row.one_device()), parity.trace(row.config(), row.mesh, batches(row.batch))
    )
    worst = found[0]
    return {
        **dataclasses.asdict(row),
        "holds": all(d.holds for d in found),
        "arrays": len(found),
        "worst": worst.name,
        "difference": worst.found,
        "allowed": worst.allowed,
        "share": round(worst.share, 4),
        "optimized": optimized,
        "seconds": round(time.monotonic() - began, 1),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The result to be read."""
    columns = ("mesh", "split", "model", "microbatches", "recompute", "worst array", "of what is allowed")
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for r in results.values():
        split = ", ".join(n if v is True else f"{n} {v}" for n, v in r["split"].items())
        model = f"{r['family']}, {r['layers']} layers, {'tied' if r['tied'] else 'untied'}, dropout {r['dropout']:g}"
        cells = (r["mesh"], split, model, r["microbatches"], r["recompute"], r["worst"], f"{r['share']:.1%}")
        lines.append(" | ".join(map(str, cells)))
    failed = [r for r in results.values() if not r["holds"]]
    worst = max(results.values(), key=lambda r: r["share"])
    meshes = {(r["mesh"], json.dumps(r["split"])) for r in results.values()}
    head = (
        f"{len(results)} comparisons with one device, on {len(meshes)} meshes with their splits, fp32, {STEPS} steps: "
        f"{len(results) - len(failed)} hold. {worst['worst']} on {worst['mesh']} is worst, at {worst['share']:.1%} "
        f"of what is allowed: {parity.OF_ARRAY:g} of the array's largest value, or {parity.OF_MODEL:g} of the largest "
        f"of its kind. Made by `python experiments/parity_matrix.py` with jax {jax.__version__}."
    )
    return head + "\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


def main() -> None:
    """Runs what is missing, and keeps the result after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run rows that are in the result, too")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--optimized", action="store_true", help="compile with all of XLA's optimizations")
    given = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", not given.optimized)
    use_devices(8)
    HERE.mkdir(exist_ok=True)
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for row in rows():
        if given.only not in row.name or (row.name in results and not given.again):
            continue
        results[row.name] = compared(row, given.optimized)
        ordered = {r.name: results[r.name] for r in rows() if r.name in results}
        RESULT.write_text(json.dumps(ordered, indent=1) + "\n")
        TABLE.write_text(table(ordered))
        kept = results[row.name]
        print(f"{row.name}: {kept['worst']} at {kept['share']:.1%}, {kept['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
