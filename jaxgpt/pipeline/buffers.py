"""Where the loop keeps what one slot makes and a later one uses: registers allocated from a schedule's table.

The loop is one program for all stages, so what it keeps lies in rings of fixed size, and the table says which place of
a ring is written or read in each slot. A value has its place from the slot that writes it to its last reader, which may
hand the place on to a write of its own slot: writes come after reads. Places are given in order of time, the lowest
free one each time, so a ring is as long as the most values alive at a time.

What an exchange brings to a stage to which nothing was sent has a place as well, so that the loop may write it without
asking: any that is free. Where at some time none is, the inbox has one place more, at its end. No value lies there.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Int

from jaxgpt.pipeline.checker import backward_begins, backward_ends
from jaxgpt.pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHTS, Schedule

Places: TypeAlias = Int[np.ndarray, "parts microbatches"]


@dataclass(frozen=True)
class Plan:
    """Places in rings, int32, and the rings' sizes; a place is 0 where its ring is not used."""

    residual: Int[np.ndarray, "ticks slots stages"]
    """Where FORWARD writes what its backward needs, and where BACKWARD, INPUT and WEIGHTS of the same microbatch and
    chunk read it."""
    residuals: int
    split: Int[np.ndarray, "ticks slots stages"]
    """Where INPUT writes what WEIGHTS needs beside the residuals, and where WEIGHTS reads it."""
    splits: int
    """0 where the schedule splits no backward."""
    take: Int[np.ndarray, "ticks slots stages"]
    """Which place of its inbox FORWARD (of activations) or BACKWARD and INPUT (of gradients) reads; 0 for the first
    part's forward and the last part's backward, which read none."""
    put_forward: Int[np.ndarray, "ticks stages"]
    """Where the activation from the previous stage goes at the end of the tick; a free place where none was sent."""
    put_backward: Int[np.ndarray, "ticks stages"]
    """Where the gradient from the next stage goes at the end of the tick; a free place where none was sent."""
    inbox_forward: int
    inbox_backward: int
    head: Int[np.ndarray, "ticks slots"]
    """Microbatch whose last part runs FORWARD in the slot, for which the head is run after it; -1 for none."""
    head_put: Int[np.ndarray, "ticks slots"]
    """Where the head's gradient of that microbatch goes, after the slot."""
    head_take: Int[np.ndarray, "ticks slots stages"]
    """Where the last part's BACKWARD or INPUT reads it."""
    heads: int
    first_forward: Int[np.ndarray, "ticks slots"]
    """Microbatch whose first part runs FORWARD in the slot, on stage 0; -1 for none."""
    first_backward: Int[np.ndarray, "ticks slots"]
    """Microbatch whose first part runs BACKWARD or INPUT in the slot, on stage 0; -1 for none."""


def plan(schedule: Schedule) -> Plan:
    """Places for everything that the loop keeps, of a table that the checker has passed."""
    shape = schedule.operation.shape
    forward, begins, ends = schedule.when(FORWARD), backward_begins(schedule), backward_ends(schedule)
    inputs, weights = schedule.when(INPUT), schedule.when(WEIGHTS)
    stage = np.broadcast_to(np.arange(schedule.parts)[:, None] % schedule.stages, forward.shape)
    readers = [schedule.when(each) for each in (BACKWARD, INPUT, WEIGHTS)]

    residual, residuals = _ring(_until(shape, forward, stage, ends))
    residual = _reads(residual, residual.copy(), forward, readers, stage)
    split, splits = _ring(_until(shape, inputs, stage, weights))
    split = _reads(split, split.copy(), inputs, [weights], stage)

    sent_forward, sent_backward = forward[:-1] // shape[1], begins[1:] // shape[1]  # ticks
    to_next, to_previous = stage[1:], stage[:-1]
    put_forward, inbox_forward = _ring(_arrivals(shape, sent_forward, to_next, forward[1:] // shape[1]))
    put_backward, inbox_backward = _ring(_arrivals(shape, sent_backward, to_previous, begins[:-1] // shape[1]))
    take = np.zeros_like(residual)
    _reads(take, put_forward, sent_forward, [forward[1:]], to_next)
    _reads(take, put_backward, sent_backward, [begins[:-1]], to_previous)

    head_put, heads = _ring(_until(shape, forward[-1:], stage[-1:], begins[-1:]))
    head_take = _reads(np.zeros_like(residual), head_put, forward[-1:], [begins[-1:]], stage[-1:])
    return Plan(
        residual=residual.reshape(shape),
        residuals=residuals,
        split=split.reshape(shape),
        splits=splits,
        take=take.reshape(shape),
        put_forward=put_forward,
        put_backward=put_backward,
        inbox_forward=inbox_forward,
        inbox_backward=inbox_backward,
        head=_which(shape, forward[-1]),
        head_put=head_put[:, -1].reshape(shape[:2]),
        head_take=head_take.reshape(shape),
        heads=heads,
        first_forward=_which(shape, forward[0]),
        first_backward=_which(shape, begins[0]),
    )


def _until(
    shape: tuple[int, ...], written: Places, stage: Places, last_read: Places
) -> Int[np.ndarray, "times stages"]:
    """When what each stage writes in each slot is read for the last time; -1 where it writes nothing."""
    until = np.full((shape[0] * shape[1], shape[2]), -1)
    there = written >= 0
    until[written[there], stage[there]] = last_read[there]
    return until


def _arrivals(shape: tuple[int, ...], sent: Places, to: Places, read: Places) -> Int[np.ndarray, "ticks stages"]:
    """As _until, in ticks, of what comes to each stage at the end of each tick: read at once where it means nothing."""
    until = np.arange(shape[0])[:, None].repeat(shape[2], axis=1)
    until[sent, to] = read
    return until


def _ring(until: Int[np.ndarray, "times stages"]) -> tuple[Int[np.ndarray, "times stages"], int]:
    """The place of what each stage writes at each time, and how many places there are."""
    place = np.zeros(until.shape, np.int32)
    for stage in range(until.shape[1]):
        taken: list[int] = []  # of each place: until when
        for time, end in enumerate(until[:, stage].tolist()):
            if end < 0:
                continue
            free = next((n for n, before in enumerate(taken) if before <= time), len(taken))
            taken[free : free + 1] = [end]
            place[time, stage] = free
    return place, int(place.max()) + 1 if (until >= 0).any() else 0


def _reads(
    into: Int[np.ndarray, "times stages"],
    put: Int[np.ndarray, "writes stages"],
    written: Places,
    read: list[Places],
    stage: Places,
) -> Int[np.ndarray, "times stages"]:
    """into, with the place of each value where it is read."""
    for times in read:
        there = times >= 0
        into[times[there], stage[there]] = put[written[there], stage[there]]
    return into


def _which(shape: tuple[int, ...], times: Int[np.ndarray, "microbatches"]) -> Int[np.ndarray, "ticks slots"]:
    """The microbatch at its time, -1 at others."""
    which = np.full(shape[:2], -1, np.int32)
    which[np.divmod(times, shape[1])] = np.arange(len(times))
    return which
