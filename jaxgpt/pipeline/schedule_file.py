"""A user's own schedule: a text file of one line a tick, and a table written as such a file.

    # stage 0 and stage 1; forwards before the bar, backwards after it
    F0 .  | .  .
    F1 F0 | .  B0
    .  F1 | B0 B1
    .  .  | B1 .

A line has one cell a stage; a bar begins the tick's next slot. A cell is an operation (F forward, B backward, I its
part towards the input, W its part towards the weights) and its microbatch, with the stage's chunk after a point where
it has several, "F3.1"; or "." for a stage that is idle. A slot may hold what any of its cells holds.
"""

import re
from pathlib import Path

import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.pipeline.checker import check
from jaxgpt.pipeline.schedule import BACKWARD, FORWARD, IDLE, INPUT, WEIGHTS, Schedule

LETTERS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHTS}
IDLE_CELL = "."
SIZES = {
    "stages": "pipe in --mesh is",
    "microbatches": "--global-batch and --micro-batch make",
    "virtual stages": "--virtual-stages is",
}
Cell = tuple[int, int, int]
"""Operation, microbatch, chunk."""


def read(path: str | Path, sizes: tuple[int, int, int] | None = None) -> Schedule:
    """The file's table, checked. sizes: the stages, microbatches and chunks that it must be of; None: any.

    Raises UserError naming file, line and rule.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise UserError(f"--schedule-file {path}: cannot be read ({reason})") from None
    ticks = [_tick(path, n, line) for n, line in enumerate(lines, 1) if line.partition("#")[0].strip()]
    if not ticks:
        raise UserError(f"--schedule-file {path}: has no ticks; write one line for each")
    shapes = {n: [len(slot) for slot in slots] for n, slots in ticks}
    first = ticks[0][0]
    for n, shape in shapes.items():
        if shape != shapes[first] or len(set(shape)) > 1 or not shape[0]:
            said = " and ".join(str(each) for each in shape)
            raise UserError(
                f"--schedule-file {path}: line {n} has {said} cells in its slots; every slot of every line must have "
                f"one cell a stage, as line {first} begins with {shapes[first][0]}"
            )
    table = _table(" ".join(str(path).split()), list(shapes), np.array([slots for _, slots in ticks], np.int32))
    ours = table.stages, table.microbatches, table.chunks
    for (name, flags), has, needs in zip(SIZES.items(), ours, sizes or ours, strict=True):
        if has != needs:
            raise UserError(f"--schedule-file {path}: is of {has} {name}, but {flags} {needs}; change either")
    return table


def text(schedule: Schedule) -> str:
    """The table as a file that read takes."""
    letters = {operation: letter for letter, operation in LETTERS.items()}

    def cell(tick: int, slot: int, stage: int) -> str:
        at = (tick, slot, stage)
        if schedule.operation[at] == IDLE:
            return IDLE_CELL
        chunk = f".{schedule.chunk[at]}" if schedule.chunks > 1 else ""
        return f"{letters[int(schedule.operation[at])]}{schedule.microbatch[at]}{chunk}"

    ticks, slots, stages = schedule.operation.shape
    cells = [[[cell(t, slot, s) for s in range(stages)] for slot in range(slots)] for t in range(ticks)]
    width = max(len(each) for tick in cells for slot in tick for each in slot)
    lines = (" | ".join(" ".join(each.ljust(width) for each in slot) for slot in tick) for tick in cells)
    return "".join(line.rstrip() + "\n" for line in lines)


def _tick(path: str | Path, number: int, line: str) -> tuple[int, list[list[Cell]]]:
    slots = line.partition("#")[0].split("|")
    return number, [[_cell(path, number, each) for each in slot.split()] for slot in slots]


def _cell(path: str | Path, number: int, cell: str) -> Cell:
    if cell == IDLE_CELL:
        return IDLE, -1, -1
    match = re.fullmatch(r"([FBIW])([0-9]{1,6})(?:\.([0-9]{1,4}))?", cell)
    if match is None:
        allowed = 'must be F, B, I or W and a microbatch, such as F3 or F3.1 with its chunk, or "." for an idle stage'
        raise UserError(f"--schedule-file {path}: line {number}: {cell!r} {allowed}")
    letter, microbatch, chunk = match.groups()
    return LETTERS[letter], int(microbatch), int(chunk or 0)


def _table(name: str, lines: list[int], cells: np.ndarray) -> Schedule:
    """lines: number of each tick's line; cells: [ticks, slots, stages, 3]."""
    operation, microbatch, chunk = np.moveaxis(cells, -1, 0)
    slots = tuple(frozenset(np.unique(operation[:, slot]).tolist()) - {IDLE} for slot in range(operation.shape[1]))
    stages, microbatches, chunks = operation.shape[2], int(microbatch.max()) + 1, int(chunk.max()) + 1
    table = Schedule(name, stages, microbatches, chunks, slots, operation, microbatch, chunk)
    try:
        check(table)
    except UserError as error:
        said = str(error).removeprefix(f"--schedule {name}: ")
        tick = re.match("tick ([0-9]+), ", said)
        line = f"line {lines[int(tick[1])]}, " if tick else ""
        raise UserError(f"--schedule-file {name}: {line}{said}") from None
    return table
