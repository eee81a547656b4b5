"""Masters and moments in the host's memory, as in ZeRO-Offload (arXiv 2101.06840); the update stays on the device.

They pass through the device one layer at a time, in loops over the rows of the stacked blocks: once to be cast for
computation, and once to be updated. So the device holds the state of a layer, or of the widest table, where it held
that of all; what computes is the same. The loops read one copy and write another, so that between them the host holds
two.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxgpt.training.microbatch import BLOCKS

Space = jax.memory.Space
Arrays = dict[str, jax.Array]
State = dict[str, Any]
HOST = "pinned_host"
"""JAX's name of the host's memory that devices read and write by themselves."""
KINDS = ("params", "mu", "nu")
"""Parts of the state that have an array for each parameter."""


def to_device(values: Any) -> Any:
    """The arrays of a tree on the device."""
    return jax.device_put(values, Space.Device)


def to_host(values: Any) -> Any:
    """The arrays of a tree in the host's memory."""
    return jax.device_put(values, Space.Host)


def computed(function: Callable[[Arrays], Arrays], params: Arrays) -> Arrays:
    """function(params) on the device, for one that treats every row of the blocks, and every other array, alone."""
    blocks, ends = _parted(params)

    def row(_: None, each: Arrays) -> tuple[None, Arrays]:
        one = function({n: lax.expand_dims(a, (0,)) for n, a in to_device(each).items()})
        return None, {n: lax.squeeze(a, (0,)) for n, a in one.items()}

    return lax.scan(row, None, blocks)[1] | function(to_device(ends))


def updated(
    update: Callable[[State, Arrays], tuple[State, jax.Array]], state: State, gradients: Arrays
) -> tuple[State, jax.Array]:
    """update(state, gradients) -> state after a step, and the learning rate; the state comes back to where it lay.

    update: an optimizer's that treats every element alone, but for "step".
    """
    step = {"step": state["step"]}
    held = {kind: _parted(state[kind]) for kind in KINDS}
    of_blocks, of_ends = _parted(gradients)

    def run(arrays: dict[str, Arrays], gradients: Arrays) -> tuple[State, dict[str, Arrays], jax.Array]:
        after, rate = update(to_device(arrays) | step, gradients)
        return after, to_host({kind: after[kind] for kind in KINDS}), rate

    def row(_: None, each: tuple[dict[str, Arrays], Arrays]) -> tuple[None, dict[str, Arrays]]:
        return None, run(*each)[1]

    _, blocks = lax.scan(row, None, ({kind: held[kind][0] for kind in KINDS}, of_blocks))
    after, ends, rate = run({kind: held[kind][1] for kind in KINDS}, of_ends)
    return {kind: blocks[kind] | ends[kind] for kind in KINDS} | {"step": after["step"]}, rate


def _parted(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Those of the stacked blocks, and the others."""
    blocks = {n: a for n, a in arrays.items() if n.startswith(BLOCKS)}
    return blocks, {n: a for n, a in arrays.items() if n not in blocks}
