"""What makes a tiny program cheap to test: compiled without most optimizations, started without a compiled start."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxgpt.training.program import Program


@contextmanager
def unoptimized(wanted: bool = True) -> Iterator[None]:
    """Within it, programs are compiled without most optimizations, if wanted: these take over half of a tiny program's
    time and move no number elsewhere."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", wanted)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def placed(program: Program, start: dict[str, Any]) -> dict[str, Any]:
    """One device's state on a program's devices: parameters with their layers in the rows of their stages."""

    def rows(name: str, array: np.ndarray) -> np.ndarray:
        table = program.rows.get(name)
        if table is None:
            return array
        return np.stack([array[layer] if layer >= 0 else np.zeros_like(array[0]) for layer in table])

    kinds = {kind: {n: rows(n, np.asarray(a)) for n, a in start[kind].items()} for kind in ("params", "mu", "nu")}
    whole = kinds | {"step": np.asarray(start["step"])}
    return jax.tree.map(lambda array, t: jax.device_put(array, t.sharding), whole, program.targets())
