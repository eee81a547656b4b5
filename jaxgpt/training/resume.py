"""The state of training as named arrays, and back from the last checkpoint that is whole."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.processes import together
from jaxgpt.training import checkpoint
from jaxgpt.training.checkpoint import DamagedCheckpoint, Shape

Tree = dict[str, Any]
"""A state, its targets, or a part of one: {"params": {name: array}, "mu": ..., "nu": ..., "step": array}."""


def flatten(state: Tree) -> dict[str, Any]:
    """{"params": {name: x}, "step": y} as {"params/name": x, "step": y}: the names in a checkpoint."""
    flat = {}
    for part, value in state.items():
        flat.update({f"{part}/{name}": x for name, x in value.items()} if isinstance(value, dict) else {part: value})
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """What flatten took apart."""
    state: Tree = {}
    for name, value in flat.items():
        part, slash, rest = name.partition("/")
        if slash:
            state.setdefault(part, {})[rest] = value
        else:
            state[part] = value
    return state


def logical_shapes(targets: Tree, logical: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shape without padding of every array of a state, from those of the parameters."""
    return {name: logical.get(name.partition("/")[2], x.shape) for name, x in flatten(targets).items()}


def stored_rows(targets: Tree, rows: Mapping[str, Shape]) -> dict[str, Shape]:
    """Where each row of every array of a state is stored, from those of the parameters that have an order."""
    named = {name: rows.get(name.partition("/")[2]) for name in flatten(targets)}
    return {name: order for name, order in named.items() if order is not None}


@dataclass(frozen=True)
class Restored:
    """A state and where it came from."""

    state: Tree
    step: int
    damaged: list[int]
    """Steps of later checkpoints that could not be trusted."""


def restore_last(
    folder: Path,
    targets: Tree,
    logical: Mapping[str, Shape],
    say: Callable[[str], None],
    rows: Mapping[str, Shape] | None = None,
) -> Restored | None:
    """The arrays that `targets` names, from the last checkpoint that is whole; None where there is no checkpoint.

    `say` is told of each damaged one. Raises UserError where none is whole, and where they are of another model.
    """
    wanted, shapes = flatten(targets), logical_shapes(targets, logical)
    orders = stored_rows(targets, rows or {})
    damaged: list[int] = []
    for step in reversed(together.told("checkpoints", lambda: checkpoint.steps(folder))):
        arrays: Tree = {}
        trouble = None
        try:
            arrays = checkpoint.restore(folder, step, wanted, shapes, orders)
        except DamagedCheckpoint as error:
            trouble = str(error)
        # Each process reads its own part: what one of them cannot trust, none takes.
        found = [one for one in together.gathered("restored", trouble) if one is not None]
        if not found:
            return Restored(unflatten(arrays), step, damaged)
        damaged.append(step)
        say(f"checkpoint of step {step} is damaged, the one before it is taken: {found[0]}")
    if damaged:
        raise UserError(
            f"{folder}: no checkpoint is whole (tried steps {', '.join(map(str, damaged))}); "
            "restore one from a copy, or begin another run with another --run"
        )
    return None
