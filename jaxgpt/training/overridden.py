"""What changing rows of the layout table by hand costs: the step with and without --layout, traced side by side."""

import dataclasses
import math

from jaxgpt.sharding.ledger import ledger
from jaxgpt.sharding.ledger_memory import kept, outer_loops
from jaxgpt.sharding.mesh import allows
from jaxgpt.training.console import Rows, size
from jaxgpt.training.program import Program


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes of one device."""

    state: int
    """Parameters and optimizer state."""
    kept: int
    """From forward to backward, in all blocks; in a pipeline with the gradients, as its loop hands on both."""
    received: float
    """From other devices in a step."""


def cost(program: Program) -> Cost:
    """Traces the program's step; nothing is compiled or run."""
    targets = program.targets()
    arrays = [target for kind in ("params", "mu", "nu") for target in targets[kind].values()]
    state = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
    traced = program.traced.jaxpr
    stacked = sum(one.nbytes * one.turns for one in kept(traced, program.sizes))
    if program.sizes["pipe"] > 1:  # kept in the rings that the loop hands on, beside the gradients
        stacked = max(loop.carried for loop in outer_loops(traced, program.sizes))
    received = sum(line.times * line.received for line in ledger(traced, program.sizes))
    return Cost(state, stacked, float(received))


def rows(program: Program) -> Rows:
    """Each cost as the tables have it, as --layout makes it, and the difference; as --layout makes it alone where the
    tables cannot be on the mesh."""
    changed, plain = cost(program), dataclasses.replace(program.config, layout="")
    names = {
        "state": "parameters and optimizer state",
        "kept": "kept from forward to backward",
        "received": "received in a step",
    }
    if not allows(plain, program.sizes):
        alone = "without it the mesh does not divide the model"
        return [(said, size(getattr(changed, name)), alone) for name, said in names.items()]
    table = cost(Program(plain, program.mesh))
    return [
        (said, size(before), "->", size(after), f"{'+' if after >= before else '-'}{size(abs(after - before))}")
        for name, said in names.items()
        for before, after in [(getattr(table, name), getattr(changed, name))]
    ]
