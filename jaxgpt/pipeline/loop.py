"""The loop that runs a schedule: a scan over ticks, each of which reads from the table what its stage does."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.pipeline.schedule import Schedule

Carry = TypeVar("Carry")
Batch = dict[str, jax.Array]


def run(schedule: Schedule, both: Callable[[Carry, Batch], Carry], carry: Carry, batch: Batch) -> Carry:
    """Runs every microbatch of batch ([microbatch, ...] each) forward and backward, as the schedule says.

    both: (carry, one microbatch) -> carry with its loss and gradients added.
    """
    if (schedule.forward != schedule.backward).any() or schedule.forward.shape[1] != 1:
        raise ValueError("a tick runs one microbatch forward and backward, on one stage")

    def tick(carry: Carry, microbatch: jax.Array) -> tuple[Carry, None]:
        return both(carry, jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, microbatch, keepdims=False), batch)), None

    return lax.scan(tick, carry, jnp.asarray(schedule.forward[:, 0]))[0]
