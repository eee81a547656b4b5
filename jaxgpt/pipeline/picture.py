"""A schedule as a picture, for terminals and as a PNG: one row a stage, time across.

Drawn to scale with F = B = W = 1: a slot is as wide as its longest stage's operation, and takes no room where all idle.
"""

import textwrap
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxgpt.errors import UserError
from jaxgpt.pipeline.checker import check, durations
from jaxgpt.pipeline.schedule import BACKWARD, FORWARD, IDLE, INPUT, WEIGHTS, Schedule

LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT: "B", WEIGHTS: "W"}
COLORS = {FORWARD: "tab:blue", BACKWARD: "tab:orange", INPUT: "tab:orange", WEIGHTS: "tab:green"}
MEANINGS = {
    FORWARD: "F forward",
    BACKWARD: "B backward",
    INPUT: "B backward towards the input",
    WEIGHTS: "W backward towards the weights",
}
CUT = " ~ "
TITLE = 150
"""Most characters in a line of a PNG's title."""
LABELLED = 400
"""Most operations in a PNG that are labelled with their microbatch; more are too narrow to be read."""

Column: TypeAlias = list[str]
"""What the stages do in a slot: one text a stage, all of one length."""


def text(schedule: Schedule, width: int) -> str:
    """Lines of at most `width` characters: F, B and W with their microbatch, and after a dot their chunk where a stage
    has several, dots for idle time; below these the idle share and how many microbatches the stages hold.

    Letters alone where the numbers would not fit. What is still too long is cut in its middle.
    """
    names = [f"stage {stage} " for stage in range(schedule.stages)]
    name_width = len(names[-1])
    room = width - name_width
    columns = _columns(schedule, numbers=True)
    if sum(len(column[0]) for column in columns) > room:
        columns = _columns(schedule, numbers=False)
    columns = _cut(columns, room)
    rows = zip(*columns, strict=True)
    lines = [f"{name:{name_width}}{''.join(row)}".rstrip()[:width] for name, row in zip(names, rows, strict=True)]
    meaning = [MEANINGS[each] for each in MEANINGS if (schedule.operation == each).any()]
    for below in (", ".join([*meaning, ". idle"]), summary(schedule)):
        lines += textwrap.wrap(below, max(width, 1))
    return "\n".join(lines)


def summary(schedule: Schedule) -> str:
    """Idle share and held microbatches in one line."""
    facts = check(schedule)
    what = "microbatches" if schedule.chunks == 1 else f"chunks of microbatches ({schedule.chunks} to each)"
    held = ", ".join(str(n) for n in facts.held)
    return f"{schedule.name}: idle for {facts.idle_share():.1%} of the time; most {what} held by a stage: {held}"


def png(schedule: Schedule, path: Path) -> None:
    """Draws it to path. UserError where there is a file already, or it cannot be written."""
    figure = Figure(figsize=(12, 1.6 + 0.4 * schedule.stages), dpi=120, layout="constrained")
    axes = figure.subplots()
    _bars(axes, schedule)
    axes.set_title(textwrap.fill(summary(schedule), TITLE), fontsize="medium")
    axes.set_xlabel("time, in forwards of a microbatch on one stage")
    axes.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_xlim(0, check(schedule).time())
    present = [each for each in MEANINGS if (schedule.operation == each).any()]
    handles = [Patch(color=COLORS[each], label=MEANINGS[each]) for each in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes what --picture asks for as a PNG. UserError where there is a file already, or it cannot be written."""
    try:
        with path.open("xb") as out:
            figure.savefig(out, format="png")
    except FileExistsError:
        raise UserError(f"--picture {path}: is there already; give another name") from None
    except OSError as error:
        raise UserError(f"--picture {path}: cannot be written ({error.strerror or error})") from None


def _bars(axes: Axes, schedule: Schedule) -> None:
    length = durations(schedule)
    slot = length.max(axis=2)
    start = np.broadcast_to((slot.cumsum() - slot.ravel()).reshape(slot.shape)[:, :, None], length.shape)
    labelled = np.count_nonzero(schedule.operation) <= LABELLED
    for stage, operation, chunk in np.ndindex(schedule.stages, len(COLORS) + 1, schedule.chunks):
        of_stage = (schedule.operation[:, :, stage] == operation) & (schedule.chunk[:, :, stage] == chunk)
        if operation == IDLE or not of_stage.any():
            continue
        bars = list(zip(start[:, :, stage][of_stage].tolist(), length[:, :, stage][of_stage].tolist(), strict=True))
        alpha = 0.9 - 0.6 * chunk / schedule.chunks  # later chunks are paler
        axes.broken_barh(bars, (stage - 0.4, 0.8), facecolor=COLORS[operation], edgecolor="white", lw=0.5, alpha=alpha)
        which = schedule.microbatch[:, :, stage][of_stage]
        for (left, wide), i in zip(bars, which, strict=True) if labelled else ():
            axes.text(left + wide / 2, stage, str(i), ha="center", va="center", fontsize=6)


def _columns(schedule: Schedule, numbers: bool) -> list[Column]:
    """The slots that take time, in order. A unit of time is a forward of one chunk."""
    units = np.rint(durations(schedule) * schedule.chunks).astype(int)
    digits = [len(str(count - 1)) for count in (schedule.microbatches, schedule.chunks)]
    gap = int(numbers)  # a space between cells with numbers
    unit = 1 + digits[0] + (1 + digits[1] if schedule.chunks > 1 else 0) + gap if numbers else 1
    columns = []
    for tick, slot in np.argwhere(units.any(axis=2)).tolist():
        column = []
        for stage, own in enumerate(units[tick, slot].tolist()):
            label = _label(schedule, (tick, slot, stage), numbers)
            filled = label.ljust(own * unit - gap, "-" if numbers else label or " ")
            column.append(filled.ljust(int(units[tick, slot].max()) * unit - gap, ".") + " " * gap)
        columns.append(column)
    return columns


def _label(schedule: Schedule, place: tuple[int, int, int], numbers: bool) -> str:
    letter = LETTERS.get(int(schedule.operation[place]), "")
    if not letter or not numbers:
        return letter
    chunk = f".{schedule.chunk[place]}" if schedule.chunks > 1 else ""
    return f"{letter}{schedule.microbatch[place]}{chunk}"


def _cut(columns: list[Column], room: int) -> list[Column]:
    """As many columns of both ends as there is room for, with a mark between them; all, where there is."""
    if sum(len(column[0]) for column in columns) <= room:
        return columns
    room -= len(CUT)
    front = back = 0
    while True:
        from_front = front <= back
        room -= len((columns[front] if from_front else columns[-1 - back])[0])
        if room < 0:
            break
        front, back = front + from_front, back + (not from_front)
    return [*columns[:front], [CUT] * len(columns[0]), *columns[len(columns) - back :]]
