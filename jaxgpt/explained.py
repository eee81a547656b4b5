"""What a configuration does on a mesh, before any of it is there: where every array lies, what is kept, what is sent.

    print_tables(explain(config))

The train step is traced, not run, on devices that need not exist. All is read from that program: layouts from the types
of its state, kept activations and gradients from its loops, communication by the ledger. On request the program is
compiled as well, and what the compiled one holds stands beside what was predicted.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxgpt.config import RunConfig
from jaxgpt.planner import absent
from jaxgpt.planner.pipeline import Pipeline
from jaxgpt.planner.verify import Totals, compiled_totals
from jaxgpt.sharding import mesh
from jaxgpt.sharding.ledger import Line, Total, ledger, totals
from jaxgpt.sharding.ledger_memory import Kept, Loop, kept, outer_loops
from jaxgpt.sharding.ledger_names import dimension_names
from jaxgpt.sharding.ledger_rules import Axes
from jaxgpt.sharding.sbp import S, Signature
from jaxgpt.training import overridden
from jaxgpt.training.console import Console, Rows, size
from jaxgpt.training.program import Program


@dataclass(frozen=True)
class Stored:
    """A parameter with its optimizer state."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    sbp: str
    nbytes: int
    """Of the fp32 parameter on one device."""
    optimizer: int
    """Of its moments there."""


@dataclass(frozen=True)
class Compiled:
    """What the compiled step holds. Bytes are those of one device."""

    target: str
    """cpu, or the kind of absent GPU."""
    totals: Totals
    arguments: int
    """State and batch."""
    temporary: int


@dataclass(frozen=True)
class Explanation:
    """A configuration on a mesh."""

    config: RunConfig
    sizes: mesh.Sizes
    dtype: str
    kernel: str
    """Of attention."""
    stored: list[Stored]
    kept: list[Kept]
    loops: list[Loop]
    lines: list[Line]
    compiled: Compiled | None
    pipeline: Pipeline | None
    changed: Rows
    """What rows of the layout changed by hand cost; empty where none is."""
    notes: list[str]
    """Choices that were made for the user."""


def explain(config: RunConfig, compiled: str | None = None) -> Explanation:
    """Traces the train step on the mesh that the configuration names, every size in it, and reads it.

    compiled: compile it, too: "cpu" for virtual CPU devices, or one of absent.GPUS. Raises UserError for a mesh that
    does not fit, and where what compiles is not installed.
    """
    sizes = mesh.parse(config.mesh)
    notes = mesh.check(config, sizes)
    on_gpu = compiled != "cpu"
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype="bf16" if on_gpu else "fp32")
        notes.append(f"computation in {config.dtype}, as on {'GPUs' if on_gpu else 'CPUs'}")
    program = Program(config, mesh.build(sizes, _devices(compiled, config, sizes, notes)))
    notes += [program.fallback] if program.fallback else []
    if config.offload != "none":
        notes.append(f"--offload {config.offload}: masters and moments lie in the host's memory, not the device's")
    traced = program.traced.jaxpr
    return Explanation(
        config=config,
        sizes=sizes,
        dtype=program.dtype,
        kernel=program.kernel,
        stored=_stored(program),
        kept=kept(traced, sizes),
        loops=outer_loops(traced, sizes),
        lines=ledger(traced, sizes, moved=on_gpu),
        compiled=None if compiled is None else _compiled(compiled, program),
        pipeline=Pipeline.of(program),
        changed=overridden.rows(program) if config.layout else [],
        notes=notes,
    )


def _devices(compiled: str | None, config: RunConfig, sizes: mesh.Sizes, notes: list[str]) -> list[Any]:
    """What the program is traced and compiled for."""
    count = math.prod(sizes.values())
    if compiled == "cpu":
        notes.append("the compiler for CPUs moves gathers out of loops and makes fp32 of bf16: no measure for GPUs")
        return mesh.prepare_devices(count)[0]
    if compiled is not None:
        return absent.devices(compiled, count)
    if config.dtype == "bf16" and absent.missing():
        notes.append("attention is traced as the kernel for CPUs, as cuDNN is not here: both send and keep the same")
        return absent.stand_ins(count, "cpu", "GPU")
    return absent.stand_ins(count, "gpu", "GPU")


def _stored(program: Program) -> list[Stored]:
    targets = program.targets()
    table = program.table
    return [
        Stored(
            name=name,
            shape=parameter.shape,
            dims=parameter.dims,
            sbp=_said(Signature.from_spec(targets["params"][name].sharding.spec, ()), parameter.dims),
            nbytes=_local_bytes(targets["params"][name]),
            optimizer=sum(_local_bytes(targets[kind][name]) for kind in ("mu", "nu")),
        )
        for name, parameter in table.items()
    ]


def _local_bytes(target: Any) -> int:
    return math.prod(target.sharding.shard_shape(target.shape)) * target.dtype.itemsize


def _said(found: Signature, dims: tuple[str, ...]) -> str:
    """ "fsdp: S(embed), tensor: S(heads)", by name where the dimension has one; B is what is left out."""
    split = [f"{axis}: S({dims[place.dim] or place.dim})" for axis, place in found.items() if isinstance(place, S)]
    return ", ".join([*split, *(f"{axis}: P" for axis in found.partial)]) or "B"


def _compiled(target: str, program: Program) -> Compiled:
    memory = program.compiled.memory_analysis()
    return Compiled(target, compiled_totals(program), memory.argument_size_in_bytes, memory.temp_size_in_bytes)


def _kept_sbp(one: Kept, names: tuple[str, ...]) -> str:
    """Its signature by name, on the manual axes as well: they split batch and sequence."""
    over = {"data": "batch", "fsdp": "batch", "context": "seq"}
    manual = [f"{a}: S({over[a]})" if over.get(a) in names else f"{a}: varies" for a in one.varying]
    typed = _said(one.signature, names)
    return ", ".join([*manual, *([typed] if typed != "B" else [])]) or "B"


# Tables


def tables(found: Explanation) -> list[tuple[str, Rows]]:
    """Title and rows of each table."""
    where = f"{math.prod(found.sizes.values())} devices, {mesh.format_mesh(found.sizes)}"
    stored = sum(each.nbytes for each in found.stored), sum(each.optimizer for each in found.stored)
    kept_bytes = sum(each.nbytes * each.turns for each in found.kept)
    sent = sum(line.times * line.received for line in found.lines)
    return [
        (
            "mesh and computation",
            [("mesh", where), ("type", f"{found.dtype} over fp32 masters"), ("attention kernel", found.kernel)],
        ),
        (
            f"parameters: layout and bytes a device; {size(stored[0])}, and {size(stored[1])} of optimizer state",
            [
                (each.name, _times(each.shape), each.sbp, size(each.nbytes), f"+ {size(each.optimizer)}")
                for each in found.stored
            ],
        ),
        *([] if found.pipeline is None else found.pipeline.tables()),
        *([(f"what --layout {found.config.layout} costs a device", found.changed)] if found.changed else []),
        ("loops: bytes a device while they run", [row for loop in found.loops for row in _loop_rows(loop)]),
        *_kept_tables(found, kept_bytes),
        (
            f"communication of a step, predicted: {size(float(sent))} received by each device",
            _communication_rows(found),
        ),
        (
            "by kind and axes: collectives and bytes received a device and step"
            + (f"; predicted, and compiled for {found.compiled.target}" if found.compiled else ""),
            _total_rows(found),
        ),
        *([] if found.compiled is None else [("memory a device, of the compiled step", _memory_rows(found.compiled))]),
    ]


def _kept_tables(found: Explanation, nbytes: int) -> list[tuple[str, Rows]]:
    """Nothing in a pipeline, whose loop hands on what is kept: it is in the table of loops."""
    title = f"kept from forward to backward: bytes a device and block; {size(nbytes)} in all blocks"
    return [] if found.pipeline else [(title, [_kept_row(found, each) for each in found.kept])]


def _times(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _loop_rows(loop: Loop) -> Rows:
    where = f"{loop.turns} turns at {loop.source}"
    return [
        (where, "gradients and what else is handed on, a pipeline's rings", size(loop.carried)),
        (where, "weights and what else is read", size(loop.constant)),
    ]


def _kept_row(found: Explanation, one: Kept) -> tuple[str, ...]:
    names = dimension_names(one.shape, found.config, found.sizes)
    shown = f"{one.dtype} {_times(one.local)}"
    return (one.name, shown, _kept_sbp(one, names), size(one.nbytes), f"x {one.turns}", str(one.source))


def _communication_rows(found: Explanation) -> Rows:
    """Lines that differ in shape alone are one row; the dearest first."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in found.lines:
        key = line.kind, line.axes, line.dtype, line.times, line.phase, line.source, line.assumed, line.merged
        groups.setdefault(key, []).append(line)
    received = {key: sum(line.times * line.received for line in lines) for key, lines in groups.items()}
    return [_communication_row(found, groups[key]) for key in sorted(groups, key=lambda key: -received[key])]


def _communication_row(found: Explanation, lines: list[Line]) -> tuple[str, ...]:
    one = lines[0]
    names = dimension_names(one.shape, found.config, found.sizes, split=True)
    shown = f"{one.dtype} {_times(one.shape)}" + (f" ({' '.join(names)})" if all(names) and names else "")
    several = f"{one.dtype}, {len(lines)} arrays"
    changes = dict.fromkeys(line.change for line in lines)
    return (
        one.kind + (" (assumed)" if one.assumed else "") + (f" (for {1 + one.merged} places)" if one.merged else ""),
        ", ".join(one.axes),
        " or ".join(changes) if len(changes) < 3 else f"{one.change} and {len(changes) - 1} more",
        shown if len(lines) == 1 else several,
        f"{size(float(sum(line.received for line in lines)))} x {one.times}",
        one.phase,
        str(one.source),
    )


def _total_rows(found: Explanation) -> Rows:
    predicted, held = totals(found.lines), found.compiled.totals if found.compiled else {}
    rows: list[tuple[str, ...]] = []
    for kind, axes in dict.fromkeys([*predicted, *held]):
        ours, theirs = predicted.get((kind, axes), Total()), held.get((kind, axes), Total())
        row = (kind, ", ".join(axes), f"{ours.times} x", size(float(ours.received)))
        beside = (f"{theirs.times} x", size(float(theirs.received)), difference(ours, theirs))
        rows.append((*row, *(beside if found.compiled else ())))
    return rows


def difference(predicted: Total, compiled: Total) -> str:
    """How far the compiled bytes are from the predicted ones, in words."""
    if predicted.received == compiled.received:
        return "the same"
    if not predicted.received:
        return "not predicted"
    return f"{100 * float(compiled.received / predicted.received - 1):+.3g} %"


def _memory_rows(found: Compiled) -> Rows:
    return [("state and batch", size(found.arguments)), ("temporary", size(found.temporary))]


def print_tables(found: Explanation) -> None:
    """Every table, and the choices that were made for the user, on standard output."""
    console = Console()
    for note in found.notes:
        console.fallback(note)
    for title, rows in tables(found):
        console.table(title, rows)


def to_json(found: Explanation) -> str:
    """The same content as the tables, every line of the ledger by itself, as JSON. Bytes are numbers."""
    predicted = totals(found.lines)
    held = found.compiled
    kept_rows = [
        dataclasses.asdict(each)
        | {"signature": _kept_sbp(each, dimension_names(each.shape, found.config, found.sizes))}
        for each in found.kept
    ]
    document = {
        "mesh": found.sizes,
        "dtype": found.dtype,
        "kernel": found.kernel,
        "notes": found.notes,
        "parameters": [dataclasses.asdict(each) for each in found.stored],
        "loops": [dataclasses.asdict(each) for each in found.loops],
        "kept": kept_rows,
        "communication": [dataclasses.asdict(line) for line in found.lines],
        "totals": [_total_json(key, total) for key, total in predicted.items()],
        "changed": [list(row) for row in found.changed],
        "pipeline": found.pipeline and found.pipeline.to_json(),
        "compiled": held
        and {
            "target": held.target,
            "arguments": held.arguments,
            "temporary": held.temporary,
            "totals": [_total_json(key, total) for key, total in held.totals.items()],
        },
    }
    return json.dumps(document, indent=2, default=_plain)


def _total_json(key: tuple[str, Axes], total: Total) -> dict[str, object]:
    return {"kind": key[0], "axes": key[1], **dataclasses.asdict(total)}


def _plain(value: object) -> float:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{value!r} has no form in JSON")
