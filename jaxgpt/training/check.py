"""A user's own configuration proved: one device against his mesh, on his data, array by array.

    report = check(config)
    report.holds, report.found[0]

Nothing is written but the token cache. Where what is compared must differ from the run itself, a line says so.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jaxgpt import host_memory
from jaxgpt.config import UNCUT, RunConfig
from jaxgpt.data import open_mixture
from jaxgpt.errors import UserError
from jaxgpt.interop.models import begun_with
from jaxgpt.model.parameters import parameter_count, parameters
from jaxgpt.processes import together
from jaxgpt.sharding import mesh
from jaxgpt.training import folder, parity
from jaxgpt.training.console import Console, Rows, size
from jaxgpt.training.parity import Batches, Difference, Trace
from jaxgpt.training.program import Program
from jaxgpt.training.step import State

STEPS = 3
"""Steps compared unless the user says how many."""

EPSILON = 1e-3
"""Least epsilon of Adam in a comparison: one near 0 makes a whole step of a gradient that is nothing but rounding."""

ONE = "data=1"


@dataclass(frozen=True)
class Report:
    """How far a mesh is from one device."""

    mesh: str
    found: list[Difference]
    """Loss, gradient norm, every gradient and every parameter, the worst first."""

    @property
    def holds(self) -> bool:
        """Whether every array is within what is allowed."""
        return all(d.holds for d in self.found)

    @property
    def status(self) -> int:
        """Exit status of a command."""
        return 0 if self.holds else 1


def check(config: RunConfig, run: Path | None = None, explicit: frozenset[str] = frozenset()) -> Report:
    """Trains the first steps of the configuration on one device and on its mesh, compares them, and says how.

    run: the run that the configuration is of, if any. explicit: fields of the configuration that were given on purpose;
    with `steps` among them all steps are compared, else the first STEPS. Raises UserError: a mesh that does not fit,
    data that cannot be read, a model too large for this machine.
    """
    console = Console()
    devices, note = mesh.prepare_devices(mesh.devices_named(config.mesh))
    sizes = mesh.parse(config.mesh, len(devices))
    for one in [together.described(devices), note, *mesh.check(config, sizes)]:
        if one is not None:
            console.fallback(one)
    text = mesh.format_mesh(sizes)
    if text == ONE:
        console.fallback(
            "one device on both sides: accumulation, recomputation, offload are proved alone; --mesh splits"
        )
    for each, where in ((_plain(config), ONE), (config, text)):
        _refuse_too_large(parity.program(each, where))
    compared, batches = _compared(config, run, "steps" in explicit, console)
    mesh.check(compared, sizes)  # again, since only the data say how large the vocabulary is
    found = _differences(compared, text, batches, console)
    report = Report(text, found)
    _say(report, parity.program(compared, text), console)
    return report


def _plain(config: RunConfig) -> RunConfig:
    """The configuration without what only a mesh or a want of memory asks for."""
    return dataclasses.replace(
        config, zero=0, sequence_parallel=False, layout="", micro_batch=None, recompute="none", offload="none", **UNCUT
    )


# What is compared


def _compared(config: RunConfig, run: Path | None, all_steps: bool, console: Console) -> tuple[RunConfig, Batches]:
    """The configuration and the global batches, and what differs from the run itself said."""
    stored = folder.read_config(run) if run is not None else None
    asked = config.model.vocab if run is None else folder.asked_vocabulary(run, config, stored)
    with together.first_alone("data", together.BUILD):
        dataset = open_mixture(config.data, config.tokenizer, asked, config.validation, say=console.say)
    dataset.check(config.model.seq)
    config = folder.resolve(config, dataset)
    steps = config.steps if all_steps else min(STEPS, config.steps)
    console.say(
        f"compared: the first {steps} of {config.steps:,} steps" + ("" if all_steps else "; --steps compares more")
    )
    changed = dataclasses.replace(config, epsilon=max(config.epsilon, EPSILON), warmup=0)
    if changed.epsilon != config.epsilon:
        console.say(f"--epsilon {changed.epsilon:g} in place of {config.epsilon:g}, which makes steps of rounding")
    if changed.warmup != config.warmup:
        console.say(f"--warmup 0 in place of {config.warmup}, in which the first steps change next to nothing")
    batches = []
    for step in range(steps):
        count, seq = config.global_batch, config.model.seq
        positions = np.arange(step * count, (step + 1) * count)
        batches.append(dataset.batch(seq, config.seed, positions, config.documents))
    return changed, batches


def _differences(config: RunConfig, text: str, batches: Batches, console: Console) -> list[Difference]:
    """One device first, so that its state is gone before the mesh's is there."""
    split = parity.program(config, text)

    def alone(dtype: Literal["fp32", "bf16"]) -> Trace:
        plain = dataclasses.replace(_plain(config), dtype=dtype)
        return _trace(_fitting(plain, split.micro_batch), batches, console)

    exact = alone("fp32")
    if not np.isfinite(exact.losses).all():
        raise UserError(
            f"one device's losses are {exact.losses.tolist()}: nothing can be compared; take a smaller --lr"
        )
    if split.dtype == "fp32":
        _refuse_unfitting(split)
        return parity.differences(exact, _trace(split, batches, console))
    one = alone("bf16")
    _refuse_unfitting(split)
    return parity.roundings(exact, one, _trace(split, batches, console))


def _trace(program: Program, batches: Batches, console: Console) -> Trace:
    config = program.config
    devices, micro = program.mesh.size, program.micro_batch
    name = "one device" if devices == 1 else f"{mesh.format_mesh(program.sizes)}"
    tokens = f"{len(batches)} x {config.global_batch // micro} microbatches of {micro} x {config.model.seq} tokens"
    console.say(f"{name}: {tokens}, {program.dtype}")
    return parity.steps(program, batches, _start(program))


def _start(program: Program) -> State | None:
    """The state of a model that is trained on; None where parameters are drawn."""
    source = begun_with(program.config)
    return None if source is None else program.begin_with(source.onto(program.table, program.shardings))


# Memory


def _room(program: Program) -> int | None:
    """Bytes that a device has, or the host for all of its virtual devices; None where it is not known."""
    if program.platform != "cpu":
        return (program.mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
    return host_memory.available()


def _in_room(program: Program, a_device: int) -> int:
    """Bytes taken of what _room says: on CPU by all devices, and by the arrays kept for comparison, which are two of
    fp32 for each parameter and trace."""
    if program.platform != "cpu":
        return a_device
    traces = 2 if program.dtype == "fp32" else 3
    return a_device * program.mesh.size + traces * 8 * parameter_count(program.config.model)


def _at_least(program: Program) -> int:
    """Bytes of parameters, moments and gradients in fp32, and of bf16 weights, each split as parameters are at rest."""
    each = 16 if program.dtype == "fp32" else 18
    table = parameters(program.config.model)
    held = sum(math.prod(layout.shard_shape(table[n].shape)) for n, layout in program.shardings.items())
    return _in_room(program, each * held)


def _needed(program: Program) -> int:
    """Bytes of the compiled step; where its backend does not tell, the least."""
    with parity.whole_products(program):
        found = program.compiled.memory_analysis()
    if found is None:
        return _at_least(program)
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    return _in_room(program, found.argument_size_in_bytes + found.temp_size_in_bytes + fresh)


def _refuse(program: Program, needed: int, held: str) -> None:
    room = _room(program)
    if room is not None and needed > room:
        where = "one device" if program.mesh.size == 1 else f"--mesh {mesh.format_mesh(program.sizes)}"
        raise UserError(
            f"{where}: a comparison of {held} takes {size(needed)}, and {size(room)} are free; "
            "check a smaller model of the same kind (--layers, --width, --vocab, --seq): the layouts stay the same"
        )


def _refuse_too_large(program: Program) -> None:
    """Before anything is read or compiled."""
    _refuse(program, _at_least(program), f"{parameter_count(program.config.model):,} parameters")


def _refuse_unfitting(program: Program) -> None:
    _refuse(program, _needed(program), f"microbatches of {program.micro_batch} sequences")


def _fitting(config: RunConfig, rows: int) -> Program:
    """The configuration on one device, with microbatches of `rows` sequences or as many as fit."""
    while True:
        program = parity.program(dataclasses.replace(config, micro_batch=rows), ONE)
        needed, room = _needed(program), _room(program)
        if room is None or needed <= room or rows == 1:
            _refuse_unfitting(program)
            return program
        # what is above the least grows with the sequences
        least = _at_least(program)
        most = min(rows - 1, int(rows * (room - least) / (needed - least)))
        rows = max([r for r in range(1, most + 1) if config.global_batch % r == 0], default=1)


# What is said


def _say(report: Report, program: Program, console: Console) -> None:
    kind = "largest" if program.dtype == "fp32" else "root mean square"
    dims = {name: p.dims for name, p in parameters(program.config.model).items()}
    rows: Rows = [
        (
            d.name,
            f"{d.found:.2e}",
            f"of {d.allowed:.2e}",
            f"{d.share:.1%}" if np.isfinite(d.share) else "not finite",
            "" if d.holds else "DIFFERS",
            _place(d, dims),
        )
        for d in report.found
    ]
    title = f"{kind} difference from one device, of what is allowed, the worst first; where it is largest"
    console.table(title, rows)
    console.say(f"allowed in {program.dtype}: {_allowed(program.dtype)}")
    bad = [d.name for d in report.found if not d.holds]
    if bad:
        console.say(f"{report.mesh} differs from one device in {len(bad)} of {len(rows)} arrays, most in {bad[0]}")
        return
    worst = report.found[0]
    console.say(
        f"{report.mesh} computes what one device does: of {len(rows)} arrays the worst, {worst.name}, "
        f"is at {worst.share:.1%} of what is allowed"
    )


def _allowed(dtype: str) -> str:
    if dtype == "fp32":
        return f"{parity.OF_ARRAY:g} of the array's largest value, or {parity.OF_MODEL:g} of the largest of its kind"
    return f"{parity.ROUNDINGS:g} times what one device's bf16 differs by from its fp32, and no less than in fp32"


def _place(difference: Difference, dims: Mapping[str, tuple[str, ...]]) -> str:
    """ "layers 1, embed 3": where an array differs most. Steps are counted from 1, all else from 0."""
    names = dims.get(difference.name.split()[-1])
    if names is None:
        return f"step {difference.at[0] + 1}"
    return ", ".join(f"{name} {index}" for name, index in zip(names, difference.at, strict=True))
