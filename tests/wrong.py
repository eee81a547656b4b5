"""What makes a step of tiny.GPT go wrong: parameters that are set, and a batch in which one sample alone meets them."""

from typing import Any

import numpy as np

from jaxgpt.sharding.hosts import put, whole
from jaxgpt.training.program import Program

UNUSED = 127
"""A row of the table that is padding: the lookup finds it, the head masks it."""
SAMPLE = 13


def changed(
    program: Program, params: dict[str, Any], name: str, value: Any, layer: int | None = None
) -> dict[str, Any]:
    """The parameters with one set to a value, of one layer or row where it has some."""
    array = np.array(whole(params[name]))
    if layer is None:
        array[...] = value
    else:
        row = program.rows[name].index(layer) if name in program.rows else layer
        array[row] = value
    return params | {name: put(array, params[name].sharding)}


def with_unused(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with a token that is in one sample alone."""
    inputs = batch["inputs"].copy()
    inputs[SAMPLE, 3] = UNUSED
    return batch | {"inputs": inputs}
