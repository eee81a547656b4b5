"""A schedule is a table: which operation, of which microbatch and chunk of layers, each stage runs in each tick.

A stage's layers lie in `chunks` chunks, its virtual stages. Chunk c of stage s is part c * stages + s of the model:
forward goes from each part to the next, so from each stage to the next and from the last stage to the first, and the
last part always lies on the last stage. A tick is made of slots, which run in order, and a stage runs at most one
operation in each. One loop runs every table, and these are its rules:

- A tick ends with an exchange between neighbours. What a part's forward made in tick t may be used by the next part
  from tick t + 1 on, what its backward made by the part before it from tick t + 1 on. So a stage runs at most one
  forward and one backward in a tick.
- Embedding and head belong to all stages, which share them by vocabulary. After each slot all stages meet for the
  microbatch whose last part has just run forward, if there is one. Its backward may run from the next slot on, which
  may be of the same tick.

Exchange, slots and head are one decision. Simulated 1F1B, forward 1, whole backward 2, 8 stages, 64 microbatches:

    form                                                            time   microbatches held at most
    a forward and a backward slot in each tick                      213    15
    slots of one operation, all neighbours tied after each          276     8
    slots of one operation, tied only where the table sends         213     8
    the same, with embedding and head shared by all stages          276     8

The exchange ties all neighbours, so a slot lasts as long as its longest stage. Where a tick has a forward slot and then
a backward slot, those that hold only one of the two are short for every stage: whole backwards have exactly the bubble
of 1F1B, whatever forward and backward cost. Their tables (gpipe, 1f1b, interleaved) take the first form. In it 1F1B
holds up to 2 (stages - 1 - s) + 1 microbatches on stage s, where stages - s would do, and in return embedding and head
are shared. The third form cannot share them, since a meeting of all stages ties all: its first and last stage would be
the slowest and the fullest. A split backward (zero-bubble) has three operations of about equal length, so ticks of one
slot, which holds any one of them, lose nothing to the tie, and need no more microbatches than 1F1B's first stage.

Sources: 1F1B and interleaving, arXiv 2104.04473; zero bubble, arXiv 2401.10241.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from jaxgpt.errors import require

IDLE, FORWARD, BACKWARD, INPUT, WEIGHTS = range(5)
"""Operations. BACKWARD is a whole backward; INPUT and WEIGHTS are its parts towards the input and the weights."""

FORWARD_THEN_BACKWARD = (frozenset({FORWARD}), frozenset({BACKWARD}))
ONE_OF_THREE = (frozenset({FORWARD, INPUT, WEIGHTS}),)

Places: TypeAlias = tuple[Any, Any, Any, Any, Any]
"""Tick, slot, stage, microbatch and chunk of an operation's runs: integer arrays or integers, broadcast together."""


@dataclass(frozen=True)
class Schedule:
    """slots: which operations each slot of a tick may hold, beside IDLE. operation, microbatch and chunk say what a
    stage runs; chunk counts the stage's own, and microbatch and chunk are -1 where it is idle. Nothing is checked here:
    `checker.check` proves a table."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    slots: tuple[frozenset[int], ...]
    operation: Int[np.ndarray, "ticks slots stages"]
    microbatch: Int[np.ndarray, "ticks slots stages"]
    chunk: Int[np.ndarray, "ticks slots stages"]

    @property
    def parts(self) -> int:
        """Parts of the model, over all stages."""
        return self.stages * self.chunks

    def when(self, operation: int) -> Int[np.ndarray, "parts microbatches"]:
        """When each part runs the operation for each microbatch: tick * slots + slot, or -1 where it never does."""
        tick, slot, stage = np.nonzero(self.operation == operation)
        times = np.full((self.parts, self.microbatches), -1)
        part = self.chunk[tick, slot, stage] * self.stages + stage
        times[part, self.microbatch[tick, slot, stage]] = tick * len(self.slots) + slot
        return times


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B: stage s runs the forward of microbatch t - s and the backward of t - (2 (stages - 1) - s) in tick t.

    Idle share (stages - 1) / (microbatches + stages - 1); stage s holds at most 2 (stages - 1 - s) + 1 microbatches.
    With one stage it is plain gradient accumulation.
    """
    _refuse_chunks("1f1b", chunks)
    _refuse_none(stages, microbatches)
    i, s = np.ogrid[:microbatches, :stages]
    runs = {FORWARD: (i + s, 0, s, i, 0), BACKWARD: (i + 2 * (stages - 1) - s, 1, s, i, 0)}
    return _table("1f1b", (stages, microbatches, chunks), FORWARD_THEN_BACKWARD, runs)


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards, which begin in the tick of the last forward.

    Idle share as 1F1B's; every stage holds all microbatches. Backwards run in the order of the microbatches, so that
    gradients are added up in the order of the other schedules.
    """
    _refuse_chunks("gpipe", chunks)
    _refuse_none(stages, microbatches)
    i, s = np.ogrid[:microbatches, :stages]
    filled = microbatches + stages - 2  # the tick in which the last stage runs the last forward
    runs = {FORWARD: (i + s, 0, s, i, 0), BACKWARD: (filled + i + stages - 1 - s, 1, s, i, 0)}
    return _table("gpipe", (stages, microbatches, chunks), FORWARD_THEN_BACKWARD, runs)


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: microbatches go through in groups of `stages`, each group through chunk after chunk.

    Stage s runs its k-th forward in tick k + s and its k-th backward, chunks in reverse order, in tick
    chunks * stages - 1 + (stages - 1 - s) + k. Idle share (stages - 1) / (chunks * microbatches + stages - 1); stage s
    holds at most (chunks + 1) * stages - 1 - 2 s microbatch-chunks.
    """
    allowed = "--schedule interleaved needs at least 2 virtual stages"
    require(chunks >= 2, "--virtual-stages", chunks, allowed, "take --schedule 1f1b where a stage is to have one")
    _refuse_none(stages, microbatches)
    allowed = f"--schedule interleaved needs a multiple of the {stages} stages"
    fix = "change --global-batch or --micro-batch, or take --schedule 1f1b"
    require(microbatches % stages == 0, "microbatches", microbatches, allowed, fix)
    k, s = np.ogrid[: microbatches * chunks, :stages]
    group, within = np.divmod(k, stages * chunks)
    chunk, i = within // stages, group * stages + k % stages
    first = chunks * stages - 1 + (stages - 1 - s)
    runs = {FORWARD: (k + s, 0, s, i, chunk), BACKWARD: (first + k, 1, s, i, chunks - 1 - chunk)}
    return _table("interleaved", (stages, microbatches, chunks), FORWARD_THEN_BACKWARD, runs)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB-H1: in each tick a stage runs one forward, one backward towards the input or one towards the weights.

    The first of the three that is ready, forwards bounded twice: stage s has at most stages - s microbatches between
    forward and backward, as 1F1B has, and none holds more than `stages`, counted until the weights' part is done. The
    weights' parts fill what would be idle.

    Ticks: max(3 m + p - 1, 2 m + 2 p - 1) with m microbatches and p stages, of which each stage works in 3 m. No table
    of such slots has fewer: the last stage begins after p - 1 ticks, and the last of its m backwards has p - 1 more
    stages to go through. So where m >= p a stage is idle for p - 1 of 3 m + p - 1 ticks, and in no case for a larger
    share than in 1F1B, if the three operations take equally long: a tick lasts as long as its longest. Every stage
    holds up to min(m, p) microbatches: the later ones put off more weights' parts.
    """
    _refuse_chunks("zero-bubble", chunks)
    _refuse_none(stages, microbatches)
    s = np.arange(stages)
    run = {each: np.zeros(stages, np.int32) for each in (FORWARD, INPUT, WEIGHTS)}  # how many each stage has run
    operations = []
    while run[WEIGHTS].min() < microbatches:
        forward, inputs, weights = run.values()
        activations = np.append(np.int32(microbatches), forward[:-1])  # how many have arrived before this tick
        gradients = np.append(inputs[1:], forward[-1])
        may_forward = (forward < activations) & (forward - inputs < stages - s) & (forward - weights < stages)
        now = np.select([may_forward, inputs < gradients, weights < inputs], list(run), IDLE)
        operations.append(now)
        run = {each: count + (now == each) for each, count in run.items()}
    runs: dict[int, Places] = {}
    for each in run:
        stage, tick = np.nonzero(np.stack(operations, axis=1) == each)  # in order of stage, then of tick
        runs[each] = (tick, 0, stage, np.tile(np.arange(microbatches), stages), 0)
    return _table("zero-bubble", (stages, microbatches, chunks), ONE_OF_THREE, runs)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""What --schedule may name: (stages, microbatches, chunks) -> table. A schedule is added by a function and a row."""


def schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The named schedule's table, checked. UserError where the name or the sizes are not allowed."""
    from jaxgpt.pipeline.checker import check  # here, because the checker imports the table's type from this module

    require(name in SCHEDULES, "--schedule", name, f"must be one of {', '.join(SCHEDULES)}")
    table = SCHEDULES[name](stages, microbatches, chunks)
    check(table)
    return table


def _refuse_none(stages: int, microbatches: int) -> None:
    require(stages >= 1, "stages", stages, "a schedule needs at least 1", "set pipe in --mesh")
    fix = "raise --global-batch or lower --micro-batch"
    require(microbatches >= 1, "microbatches", microbatches, "a schedule needs at least 1", fix)


def _refuse_chunks(name: str, chunks: int) -> None:
    fix = f"leave it out for --schedule {name}, or take --schedule interleaved"
    require(chunks == 1, "--virtual-stages", chunks, "only --schedule interleaved has virtual stages", fix)


def _table(
    name: str, sizes: tuple[int, int, int], slots: tuple[frozenset[int], ...], runs: Mapping[int, Places]
) -> Schedule:
    """sizes: stages, microbatches, chunks. runs: where each operation stands. All else is idle."""
    stages, microbatches, chunks = sizes
    shape = (1 + max(int(np.max(tick)) for tick, *_ in runs.values()), len(slots), stages)
    operation = np.full(shape, IDLE, np.int32)
    microbatch, chunk = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    for each, (tick, slot, stage, i, c) in runs.items():
        operation[tick, slot, stage] = each
        microbatch[tick, slot, stage] = i
        chunk[tick, slot, stage] = c
    return Schedule(name, stages, microbatches, chunks, slots, operation, microbatch, chunk)
