"""What follows from a configuration, as tables to be read before the first step."""

import math
import time
from collections import Counter

from jaxgpt.config import RunConfig
from jaxgpt.data import Mixture
from jaxgpt.model.parameters import parameters
from jaxgpt.planner.flops import flops_per_token
from jaxgpt.planner.pipeline import Pipeline
from jaxgpt.sharding.mesh import crossing_axes, format_mesh
from jaxgpt.sharding.sbp import S, sbp
from jaxgpt.training import overridden, throughput
from jaxgpt.training.console import Rows, duration, size
from jaxgpt.training.program import Program

Table = tuple[str, Rows]

DOCUMENTS = {
    "joined": "joined: the next one's first token is predicted, and all before it is seen",
    "masked": "masked: the next one's first token is not predicted, and all before it is seen",
    "separate": "separate: each sees itself alone, its positions begin at 0, its first token is not predicted",
}
"""What becomes of several documents in one sample."""


def tables(config: RunConfig, program: Program, dataset: Mixture) -> list[Table]:
    """Title and rows of each table. Compiles the train step, whose memory is among them."""
    changed = [(f"what --layout {config.layout} costs a device", overridden.rows(program))] if config.layout else []
    return [
        ("data", _data(config, dataset)),
        ("parameters", _parameters(config)),
        ("a step", _step(config, program, dataset)),
        *([] if (pipeline := Pipeline.of(program)) is None else pipeline.tables()),
        ("mesh", _mesh(program)),
        ("layouts: S(dimension) where an axis splits it, B (a whole copy) on all other axes", layout_rows(program)),
        *changed,
        ("memory a device, of the compiled step", _memory(program)),
    ]


def utilisation(config: RunConfig, program: Program) -> tuple[float | None, str]:
    """FLOP/s of all devices at their peak, or None, and the line that says what MFU means or why there is none."""
    kind = program.mesh.devices.flat[0].device_kind
    peak = throughput.peak_flops(kind, program.dtype)
    if peak is None:
        return None, f"MFU is left out, since no peak is known for {kind} in {program.dtype}"
    flops = flops_per_token(config.model)
    named = f"{throughput.FORMULA} ({flops / 1e6:,.1f} MFLOP); peak {peak / 1e12:g} TFLOP/s ({kind}, {program.dtype})"
    if program.separate:
        named += "; attention is counted as if a sample were one document"
    return peak * program.mesh.size, named


def _data(config: RunConfig, dataset: Mixture) -> Rows:
    tokenizer = dataset.tokenizer
    return [
        *_sources(dataset),
        ("tokenizer", f"{tokenizer.name}, {tokenizer.size:,} entries, held as {config.model.padded_vocab:,}"),
        ("tokens to train on", f"{dataset.train_tokens:,}"),
        ("tokens to validate", f"{sum(map(len, dataset.validation)):,}"),
    ]


def _sources(dataset: Mixture) -> Rows:
    if len(dataset.parts) == 1:
        return [("text", dataset.describe())]
    whole = sum(dataset.weights)
    return [
        (f"{part.weight / whole:.4g} of the samples", found.manifest["source"])
        for part, found in zip(dataset.parts, dataset.datasets, strict=True)
    ]


def _parameters(config: RunConfig) -> Rows:
    groups: Counter[str] = Counter()
    for name, parameter in parameters(config.model).items():
        parts = name.removeprefix("blocks.").split(".")
        group = f"{config.model.layers} x {parts[0]}" if name.startswith("blocks.") else parts[0]
        groups[group] += math.prod(parameter.logical)
    return [*groups.items(), ("all", groups.total())]


def _step(config: RunConfig, program: Program, dataset: Mixture) -> Rows:
    tokens = config.global_batch * config.model.seq
    passes = config.steps * tokens / dataset.train_tokens
    return [
        ("sequences", f"{config.global_batch} of {config.model.seq} tokens"),
        ("microbatches", f"{config.global_batch // program.micro_batch} of {program.micro_batch} sequences"),
        ("tokens", f"{tokens:,}"),
        ("in all", f"{config.steps:,} steps, {config.steps * tokens:,} tokens, {passes:.3g} passes over the text"),
        ("computation", f"{program.dtype} over fp32 masters, recomputation: {config.recompute}"),
        *([("in the host's memory", "masters and moments")] if config.offload != "none" else []),
        ("documents", DOCUMENTS[config.documents]),
        ("attention kernel", program.fallback or program.kernel),
    ]


def _mesh(program: Program) -> Rows:
    crossing = crossing_axes(program.mesh)
    devices = program.mesh.devices
    return [
        ("axes", format_mesh(program.sizes)),
        ("devices", f"{devices.size} x {devices.flat[0].device_kind}"),
        ("axes across hosts", ", ".join(crossing) or "none"),
    ]


def layout_rows(program: Program) -> Rows:
    """Name, shape and where it lies, of each parameter."""
    rows = []
    for name, parameter in parameters(program.config.model).items():
        places = sbp(program.shardings[name])
        split = [f"{axis}: S({parameter.dims[place.dim]})" for axis, place in places.items() if isinstance(place, S)]
        rows.append((name, " x ".join(map(str, parameter.shape)), ", ".join(split) or "B"))
    return rows


def _memory(program: Program) -> Rows:
    began = time.monotonic()
    found = program.compiled.memory_analysis()
    compiled = ("compiled in", duration(time.monotonic() - began))
    if found is None:
        return [("not told by this backend",), compiled]
    arguments, temporary = found.argument_size_in_bytes, found.temp_size_in_bytes
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    return [
        ("state and batch", size(arguments)),
        ("temporary", size(temporary)),
        *([("in the host's memory", size(held))] if (held := found.host_argument_size_in_bytes) else []),
        ("all", size(arguments + temporary + fresh)),
        compiled,
    ]
