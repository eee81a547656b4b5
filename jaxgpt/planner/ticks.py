"""What a schedule's table comes to, without the table: ticks, slots, places of rings, as functions of its sizes.

A search asks for thousands of plans, and a table of 64 stages and 512 microbatches takes a second to plan. Tests prove
each function equal to the tables, and to the rings that pipeline.buffers plans for them.
"""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxgpt.pipeline.schedule import FORWARD, INPUT, WEIGHTS, zero_bubble


def ticks(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Length of the table."""
    p, m, v = stages, microbatches, chunks
    if p == 1:
        return m
    if schedule == "gpipe":
        return 2 * (m + p - 1) - 1
    if schedule == "interleaved":
        return m * v + v * p + p - 2
    if schedule == "zero-bubble":
        return max(3 * m + p - 1, 2 * m + 2 * p - 1)
    return m + 2 * (p - 1)


def table_time(schedule: str, stages: int, microbatches: int, chunks: int, f: float, b: float, w: float) -> float:
    """Time of the table where a chunk's forward takes f, and its backward b towards the input and w towards the
    weights: every slot lasts as long as its longest stage's operation, as in pipeline.checker."""
    p, m, v = stages, microbatches, chunks
    if schedule == "zero-bubble" and p > 1:
        return sum(n * max((f, b, w)[kind] for kind in kinds) for kinds, n in zero_bubble_slots(p, m).items())
    return (m * v + p - 1) * (f + b + w)


@functools.lru_cache(maxsize=4096)
def zero_bubble_slots(stages: int, microbatches: int) -> Mapping[frozenset[int], int]:
    """Ticks of the zero-bubble table by what its stages run in them: 0 forward, 1 backward towards the input, 2 towards
    the weights. A tick lasts as long as its longest.

    Beyond SETTLED microbatches for each stage every microbatch adds the same ticks.
    """
    settled = SETTLED * stages
    if microbatches > settled:
        fewer, most = zero_bubble_slots(stages, settled - 1), zero_bubble_slots(stages, settled)
        more = microbatches - settled
        return {kinds: n + more * (n - fewer.get(kinds, 0)) for kinds, n in most.items()}
    operation = zero_bubble(stages, microbatches).operation[:, 0]
    runs = np.stack([(operation == each).any(axis=1) for each in (FORWARD, INPUT, WEIGHTS)], axis=1)
    return Counter(frozenset(np.flatnonzero(row).tolist()) for row in runs)


SETTLED = 4


@dataclass(frozen=True)
class Rings:
    """Places of each ring, as in pipeline.buffers.Plan."""

    residuals: int
    splits: int
    inbox_forward: int
    inbox_backward: int
    heads: int


def rings(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Rings:
    """Of a table of these sizes. One stage that runs every microbatch forward and straight backward has none."""
    p, m, v = stages, microbatches, chunks
    if p == 1:
        return Rings(0, 0, 0, 0, 0)
    if schedule == "gpipe":
        return Rings(m, 0, 1, 1, m)
    if schedule == "interleaved":
        return Rings(min(m * v, (v + 1) * p - 1), 0, 1, 1, 1)
    if schedule == "zero-bubble":
        return Rings(min(m, p), min(m, p), min(m, 2), 2 if m > p else 1, 1)
    return Rings(min(m, 2 * p - 1), 0, 1, 1, 1)
