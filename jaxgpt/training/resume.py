"""The state of training as named arrays, and back from the last checkpoint that is whole."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.processes.together import EVERYONE
from jaxgpt.training import checkpoint
from jaxgpt.training.checkpoint import DamagedCheckpoint, Shape
from jaxgpt.training.group import PATIENCE, Group
from jaxgpt.training.retention import LAST, find

Tree = dict[str, Any]
"""A state, its targets, or a part of one: {"params": {name: array}, "mu": ..., "nu": ..., "step": array}."""
_DAMAGED = "damaged: "


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
    *,
    wanted: str = LAST,
    strict: bool = False,
    group: Group = EVERYONE,
) -> Restored | None:
    """The arrays that `targets` names, from the last checkpoint that is whole; None where there is no checkpoint.

    `wanted`: another one, as retention.find takes it. `say` is told of each damaged one; a damaged one that is `wanted`
    by name, and any if `strict`, is refused. Processes of a `group` take the same one: what one of them finds
    damaged is damaged for all. Raises UserError where none is whole, and where they are of another model.
    """
    flat, shapes = flatten(targets), logical_shapes(targets, logical)
    orders = stored_rows(targets, rows or {})
    damaged: list[int] = []
    for step in reversed(_agreed(folder, wanted, group)):
        try:
            arrays = _together(partial(checkpoint.restore, folder, step, flat, shapes, orders), group)
        except DamagedCheckpoint as error:
            if wanted != LAST:
                raise UserError(f"--step {wanted}: the checkpoint of step {step} is damaged: {error}") from None
            if strict:
                raise UserError(
                    f"--resume strict: the checkpoint of step {step} is damaged: {error}; "
                    "restore it from a copy, or give --resume auto, which takes the one before it"
                ) from None
            damaged.append(step)
            say(f"checkpoint of step {step} is damaged, the one before it is taken: {error}")
        else:
            return Restored(unflatten(arrays), step, damaged)
    if damaged:
        raise UserError(
            f"{folder}: no checkpoint is whole (tried steps {', '.join(map(str, damaged))}); "
            "restore one from a copy, or begin another run with another --run"
        )
    return None


def _agreed(folder: Path, wanted: str, group: Group) -> list[int]:
    """The steps of the checkpoints that may be taken, as process 0 sees them: a shared disk may lag for others."""
    there = checkpoint.steps(folder) if wanted == LAST else [find(folder, wanted)]
    listed = group.exchange("checkpoints", " ".join(map(str, there)), PATIENCE)[0]
    return [int(step) for step in listed.split()]


def _together(restore: Callable[[], dict[str, Any]], group: Group) -> dict[str, Any]:
    """What restore returns, where it returns in every process. Raises what it has raised in one of them."""
    failed = "ended by an error of its own"
    arrays: dict[str, Any] = {}
    try:
        arrays = restore()
        failed = ""
    except DamagedCheckpoint as error:
        failed = f"{_DAMAGED}{error}"
    except UserError as error:
        failed = str(error)
    finally:
        told = group.exchange("checkpoint restored", failed, PATIENCE)
    met = [(index, text) for index, text in enumerate(told) if text]
    if not met:
        return arrays
    whose = "" if group.count == 1 else f"process {met[0][0]}: "
    damage = all(text.startswith(_DAMAGED) for _, text in met)
    raise (DamagedCheckpoint if damage else UserError)(whose + met[0][1].removeprefix(_DAMAGED))
