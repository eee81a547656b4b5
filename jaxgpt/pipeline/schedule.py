"""A schedule is a table: which microbatch's forward and backward each stage runs in each tick."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

IDLE = -1


@dataclass(frozen=True)
class Schedule:
    """forward, backward: the microbatch that a stage runs in a tick, or IDLE."""

    forward: Int[np.ndarray, "ticks stages"]
    backward: Int[np.ndarray, "ticks stages"]


def accumulation(microbatches: int) -> Schedule:
    """One stage: each microbatch forward and backward, one after another. Plain gradient accumulation."""
    each = np.arange(microbatches, dtype=np.int32)[:, None]
    return Schedule(each, each)
