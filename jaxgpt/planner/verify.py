"""A plan verified: its train step compiled for devices that are not there, and what the compiler says beside the plan.

    found = verify(estimate, program, "h100")
    found.fits, found.rows()

The compiler's memory and collectives replace what was predicted of them. Attention is the kernel that the run itself
would take: another one in its place would falsify memory, so where it cannot be compiled nothing is (planner.absent).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.planner import absent
from jaxgpt.planner.hardware import Hardware
from jaxgpt.planner.plan import Estimate
from jaxgpt.sharding.hlo import collectives
from jaxgpt.sharding.ledger import Total, ledger, totals
from jaxgpt.sharding.ledger_rules import Axes
from jaxgpt.training.console import Rows, size
from jaxgpt.training.program import Program

CPU = "cpu"
Totals = Mapping[tuple[str, Axes], Total]


@dataclass(frozen=True)
class Verified:
    """What the compiler makes of a plan. Bytes are those of one device."""

    estimate: Estimate
    target: str
    """What it was compiled for."""
    kernel: str
    """Of attention."""
    arguments: int
    """State and batch."""
    temporary: int
    host: int
    """In the host's memory: state, and what a second copy of it takes."""
    peak: int
    """Most that is held at a time, on the device."""
    predicted: Totals
    """Received in a step, by kind of collective and axes: by the ledger of the traced step."""
    compiled: Totals
    """The same of the compiled one."""

    @property
    def fits(self) -> bool:
        return self.peak <= self.estimate.capacity

    def rows(self) -> Rows:
        """Predicted, compiled, and the difference."""
        memory = self.estimate.memory
        state = memory.parameters + memory.optimizer
        rows = [
            ("", "predicted", f"compiled for {self.target}", "difference"),
            _row("memory, all", self.estimate.peak_bytes, self.peak),
            ("  state and batch", size(self.arguments), "", f"parameters and optimizer predicted: {size(state)}"),
            ("  temporary", size(self.temporary), "", f"all else predicted: {size(self.estimate.peak_bytes - state)}"),
        ]
        if self.host:
            rows.append(_row("in the host's memory", self.estimate.host_bytes, self.host))
        for kind, axes in dict.fromkeys([*self.predicted, *self.compiled]):
            ours, theirs = (each.get((kind, axes), Total()) for each in (self.predicted, self.compiled))
            rows.append(_row(f"{kind} over {', '.join(axes)}", float(ours.received), float(theirs.received)))
        return rows

    def to_json(self) -> dict[str, Any]:
        """As numbers."""
        keys = dict.fromkeys([*self.predicted, *self.compiled])
        return {
            "target": self.target,
            "attention_kernel": self.kernel,
            "peak_bytes": self.peak,
            "predicted_peak_bytes": self.estimate.peak_bytes,
            "argument_bytes": self.arguments,
            "temporary_bytes": self.temporary,
            "host_bytes": self.host,
            "fits": self.fits,
            "collectives": [
                {
                    "kind": kind,
                    "axes": list(axes),
                    "predicted_bytes": float(self.predicted.get((kind, axes), Total()).received),
                    "bytes": float(self.compiled.get((kind, axes), Total()).received),
                }
                for kind, axes in keys
            ],
        }


def target(hardware: Hardware) -> str:
    """What compiles for a kind of device: one of absent.GPUS, or CPU. Raises UserError where nothing does."""
    if hardware.kind == CPU:
        return CPU
    for name, gpu in absent.GPUS.items():
        if hardware.kind and re.fullmatch(hardware.kind, gpu.name):
            return name
    known = ", ".join(gpu.name for gpu in absent.GPUS.values())
    raise UserError(
        f"--verify: nothing is known that compiles for {hardware.name}, where it is absent; for {known} it is"
    )


def verify(estimate: Estimate, program: Program, named: str) -> Verified:
    """Compiles the plan's train step. program: of the plan, over devices of target()'s kind, `named`."""
    found = program.compiled.memory_analysis()
    lines = ledger(program.traced.jaxpr, program.sizes, moved=named != CPU)
    return Verified(
        estimate=estimate,
        target=named,
        kernel=program.step_of.kernel,
        arguments=found.argument_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        host=found.host_argument_size_in_bytes + found.host_temp_size_in_bytes,
        peak=peak(found),
        predicted=totals(lines),
        compiled=compiled_totals(program),
    )


def peak(memory: Any) -> int:
    """Most bytes that a device holds at a time, of what a compiled program's memory_analysis() tells: without what lies
    in the host's memory, which counts it among its arguments."""
    held: int = memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes
    return held


def compiled_totals(program: Program) -> Totals:
    """Collectives of the compiled step and bytes that a device receives, by kind and axes."""
    held: dict[tuple[str, Axes], Total] = {}
    for one in collectives(program.compiled.as_text()):
        key = one.kind, one.axes(program.sizes)
        held[key] = held.get(key, Total()).add(one.times, one.result, one.received)
    return held


def _row(name: str, predicted: float, compiled: float) -> tuple[str, ...]:
    change = "the same" if predicted == compiled else "not predicted"
    if predicted and predicted != compiled:
        change = f"{100 * (compiled / predicted - 1):+.2g} %"
    return name, size(predicted), size(compiled), change
