"""Proves of a schedule's table, a user's own included, that the loop may run it, and says what it costs.

    check(table).idle_share()

The rules are those at the head of `schedule`. What breaks one is refused in one line, which names the first place in
the table that does so, and the rule.
"""

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxgpt.errors import UserError
from jaxgpt.pipeline.schedule import BACKWARD, FORWARD, IDLE, INPUT, WEIGHTS, Schedule

NAMES = ("IDLE", "FORWARD", "BACKWARD", "INPUT", "WEIGHTS")


@dataclass(frozen=True)
class Facts:
    """What follows from a sound table.

    ticks: its length. held: the most microbatch-chunks that each stage keeps at a time, from a chunk's forward until
    its whole backward, or the weights' part of it, is done. messages: activations sent from one stage to another, and
    as many gradients the other way.
    """

    schedule: Schedule
    ticks: int
    held: tuple[int, ...]
    messages: int

    def time(self, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> float:
        """Time of the table where a stage's forward of a microbatch takes f, its backward towards the input b and
        towards the weights w: every slot lasts as long as its longest stage's operation."""
        return float(durations(self.schedule, f, b, w).max(axis=2).sum())

    def idle_share(self, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> float:
        """Share of the stages' time in which they run nothing: 1 - (all operations' time) / (stages * time(f, b, w)).

        With p stages, m microbatches and v chunks it is (p-1) / (m + p-1) for 1f1b and gpipe, (p-1) / (v m + p-1) for
        interleaved, and at f = b = w (p-1) / (3 m + p-1) for zero-bubble where m >= p.
        """
        return 1 - float(durations(self.schedule, f, b, w).sum()) / (self.schedule.stages * self.time(f, b, w))


def durations(
    schedule: Schedule, f: float = 1.0, b: float = 1.0, w: float = 1.0
) -> Float[np.ndarray, "ticks slots stages"]:
    """How long each operation takes, with f, b and w as in `Facts.time`; a chunk costs a stage's share of them."""
    return np.array([0.0, f, b + w, b, w])[schedule.operation] / schedule.chunks


def check(schedule: Schedule) -> Facts:
    """UserError, which names tick, slot, stage, microbatch and rule, unless the loop may run the table."""
    _check_shapes(schedule)
    _check_entries(schedule)
    _check_once(schedule)
    _check_exchange(schedule)
    _check_order(schedule)
    messages = (schedule.parts - 1) * schedule.microbatches if schedule.stages > 1 else 0
    return Facts(schedule, len(schedule.operation), _held(schedule), messages)


def backward_begins(schedule: Schedule) -> Int[np.ndarray, "parts microbatches"]:
    """When, as in `Schedule.when`, each part runs what its gradient towards the input comes from."""
    return np.maximum(schedule.when(BACKWARD), schedule.when(INPUT))


def backward_ends(schedule: Schedule) -> Int[np.ndarray, "parts microbatches"]:
    """When, as in `Schedule.when`, each part is done with what its forward kept."""
    return np.maximum(schedule.when(BACKWARD), schedule.when(WEIGHTS))


def _check_shapes(schedule: Schedule) -> None:
    for size in ("stages", "microbatches", "chunks"):
        _require(schedule, getattr(schedule, size) >= 1, f"{size} is {getattr(schedule, size)}, must be at least 1")
    _require(schedule, len(schedule.slots) >= 1, "a tick has no slots, must have at least 1")
    known = frozenset({FORWARD, BACKWARD, INPUT, WEIGHTS})
    for slot, allowed in enumerate(schedule.slots):
        _require(schedule, allowed <= known, f"slot {slot} may hold {sorted(allowed)}, must be some of {sorted(known)}")
    _require(schedule, schedule.operation.size > 0, "the table is empty, must have at least 1 tick")
    expected = (*schedule.operation.shape[:1], len(schedule.slots), schedule.stages)
    for array in ("operation", "microbatch", "chunk"):
        value = getattr(schedule, array)
        _require(
            schedule, np.issubdtype(value.dtype, np.integer), f"{array} is of {value.dtype}, must be of whole numbers"
        )
        shaped = f"{array} has shape {value.shape}, must have {expected}: ticks, slots, stages"
        _require(schedule, value.shape == expected, shaped)
    forwards, places = schedule.parts * schedule.microbatches, schedule.operation.size
    few = f"{schedule.microbatches} microbatches in {schedule.parts} parts are {forwards} forwards, and it has {places}"
    _require(schedule, forwards <= places, f"{few} places: number microbatches and chunks from 0, with none left out")


def _check_entries(schedule: Schedule) -> None:
    """Every entry is one that its slot may hold, of a microbatch and a chunk that there are."""
    for slot, allowed in enumerate(schedule.slots):
        wrong = np.zeros(schedule.operation.shape, bool)
        wrong[:, slot] = ~np.isin(schedule.operation[:, slot], [IDLE, *allowed])
        for place in _places(wrong):
            may = " or ".join(NAMES[each] for each in sorted(allowed)) or "nothing"
            _refuse(schedule, place, f"{_named(schedule, place)} in a slot that may hold {may}")
    idle = schedule.operation == IDLE
    for array, size in (("microbatch", schedule.microbatches), ("chunk", schedule.chunks)):
        value = getattr(schedule, array)
        for place in _places(idle & (value != -1)):
            _refuse(schedule, place, f"{array} {value[place]} where the stage is idle, must be -1")
        for place in _places(~idle & ((value < 0) | (value >= size))):
            _refuse(schedule, place, f"{array} {value[place]}, must be 0 to {size - 1}")


def _check_once(schedule: Schedule) -> None:
    """Every microbatch runs through every part forward once, and backward once, whole or in its two parts."""
    tick, slot, stage = place = np.nonzero(schedule.operation != IDLE)  # in order of time
    part = schedule.chunk[place] * schedule.stages + stage
    runs = np.stack([schedule.operation[place], part, schedule.microbatch[place]])
    again = np.setdiff1d(np.arange(len(tick)), np.unique(runs, axis=1, return_index=True)[1])
    for n in again:
        at = (int(tick[n]), int(slot[n]), int(stage[n]))
        _refuse(schedule, at, f"{_named(schedule, at)} of part {part[n]} a second time, must run once")
    forward, whole, inputs, weights = (schedule.when(each) for each in (FORWARD, BACKWARD, INPUT, WEIGHTS))
    for split in (inputs, weights):
        for g, i in np.argwhere((whole >= 0) & (split >= 0)).tolist():
            at = _place(schedule, int(max(whole[g, i], split[g, i])), g)
            _refuse(schedule, at, f"part {g} runs BACKWARD and a part of it as well, must run one or the other")
    backward = {"BACKWARD or INPUT": np.maximum(whole, inputs), "WEIGHTS after its INPUT": np.maximum(whole, weights)}
    for name, times in ({"FORWARD": forward} | backward).items():
        for g, i in np.argwhere(times < 0):
            where = f"stage {g % schedule.stages}, chunk {g // schedule.stages}, microbatch {i}"
            raise UserError(f"--schedule {schedule.name}: {where}: no tick runs {name} of part {g}, must run once")


def _check_exchange(schedule: Schedule) -> None:
    """The exchange at the end of a tick takes one activation and one gradient of each stage."""
    for kinds, sent in (((FORWARD,), "activation"), ((BACKWARD, INPUT), "gradient")):
        sends = np.isin(schedule.operation, kinds)
        for place in _places(sends & (np.cumsum(sends, axis=1) > 1)):
            _refuse(schedule, place, f"{_named(schedule, place)} is the stage's second {sent} in a tick, must be one")


def _check_order(schedule: Schedule) -> None:
    """What an operation needs has arrived."""
    slots = len(schedule.slots)
    forward, begins, weights = schedule.when(FORWARD), backward_begins(schedule), schedule.when(WEIGHTS)
    sent, returned = ((times // slots + 1) * slots for times in (forward, begins))  # when the exchange has brought it
    last = schedule.parts - 1
    # When it runs, when what it needs is there, the first part that this is about, what it needs.
    rules = (
        (forward[1:], sent[:-1], 1, "the previous part's activation"),
        (begins[last:], forward[last:] + 1, last, "the head's gradient"),
        (begins[:last], returned[1:], 0, "the next part's gradient"),
        (weights, np.where(weights >= 0, begins + 1, -1), 0, "its INPUT"),
    )
    for times, there, first, what in rules:
        late = np.argwhere(times < there)
        if len(late):
            g, i = min(late.tolist(), key=lambda at: int(times[at[0], at[1]]))
            place = _place(schedule, int(times[g, i]), first + g)
            tick, slot = divmod(int(there[g, i]), slots)
            after = f"{what}, there from tick {tick}, slot {slot} on"
            _refuse(schedule, place, f"{_named(schedule, place)} of part {first + g} needs {after}")


def _held(schedule: Schedule) -> tuple[int, ...]:
    stage = np.arange(schedule.parts)[:, None] % schedule.stages
    change = np.zeros((schedule.operation.shape[0] * len(schedule.slots) + 1, schedule.stages), int)
    np.add.at(change, (schedule.when(FORWARD), stage), 1)
    np.add.at(change, (backward_ends(schedule) + 1, stage), -1)
    return tuple(int(n) for n in change.cumsum(axis=0).max(axis=0))


def _places(wrong: Bool[np.ndarray, "ticks slots stages"]) -> list[tuple[int, int, int]]:
    """Where it is wrong, in order of time."""
    return [(tick, slot, stage) for tick, slot, stage in np.argwhere(wrong).tolist()]


def _place(schedule: Schedule, time: int, part: int) -> tuple[int, int, int]:
    tick, slot = divmod(time, len(schedule.slots))
    return tick, slot, part % schedule.stages


def _named(schedule: Schedule, place: tuple[int, int, int]) -> str:
    operation = int(schedule.operation[place])
    return NAMES[operation] if 0 <= operation < len(NAMES) else f"operation {operation}"


def _require(schedule: Schedule, good: bool, rule: str) -> None:
    if not good:
        raise UserError(f"--schedule {schedule.name}: {rule}")


def _refuse(schedule: Schedule, place: tuple[int, int, int], rule: str) -> NoReturn:
    tick, slot, stage = place
    where = f"tick {tick}, slot {slot}, stage {stage}, microbatch {schedule.microbatch[place]}"
    raise UserError(f"--schedule {schedule.name}: {where}: {rule}")
