"""Placement: which layers lie on which stage, and in which row of a stage's arrays.

A model's layers are cut into stages * chunks parts that follow one another; part g lies on stage g % stages as its
chunk g // stages. A stage's arrays have the same number of rows on all stages, so a part that is shorter than the
longest leaves rows empty: they hold zeros, which get neither gradient nor decay, and no device computes with them.

Embedding, head and loss belong to no stage: their table lies over `pipe` by vocabulary, and all stages take their share
of them at once (pipeline.loop). So layers alone decide what a stage costs, and `auto` makes parts as even as they can
be. Where they cannot be even, the longer ones come last: the nearer to the end, the fewer microbatches a stage holds.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxgpt.errors import UserError, require

EMPTY = -1


@dataclass(frozen=True)
class Placement:
    """parts: how many layers each of the stages * chunks parts has, in the order of the model."""

    stages: int
    chunks: int
    parts: tuple[int, ...]

    @property
    def layers(self) -> int:
        return sum(self.parts)

    @property
    def longest(self) -> int:
        """Rows of a part."""
        return max(self.parts)

    @property
    def rows(self) -> Int[np.ndarray, "stages chunks longest"]:
        """Logical layer of each row, or EMPTY."""
        table = np.full((self.stages, self.chunks, self.longest), EMPTY, np.int32)
        first = 0
        for part, count in enumerate(self.parts):
            table[part % self.stages, part // self.stages, :count] = range(first, first + count)
            first += count
        return table

    @property
    def order(self) -> tuple[int, ...] | None:
        """Logical layer, or EMPTY, of each row of an array that is split over `pipe`; None where rows are the layers
        in their order."""
        order = tuple(int(layer) for layer in self.rows.ravel())
        return None if order == tuple(range(self.layers)) else order

    @property
    def full(self) -> bool:
        """Whether no row is empty."""
        return len(set(self.parts)) == 1


def place(layers: int, stages: int, chunks: int, wanted: str) -> Placement:
    """The placement that --stages says: "auto", or layers of each part, "7,8,8,7".

    Raises UserError where there are fewer layers than parts, or the parts are not those of the mesh or of the model.
    """
    parts = stages * chunks
    cut = f"pipe={stages}" + (f" x --virtual-stages {chunks}" if chunks > 1 else "")
    fewer = layers // stages  # chunks that there are layers for
    if chunks > fewer > 1:
        few = f"pipe={stages} x {chunks} are {parts} parts, more than --layers {layers}"
        raise UserError(f"--virtual-stages {chunks}: {few}; give at most {fewer}")
    require(layers >= parts, "--layers", layers, f"must be at least the {parts} parts of {cut}")
    if wanted == "auto":
        short, longer = divmod(layers, parts)
        return Placement(stages, chunks, tuple(short + (part >= parts - longer) for part in range(parts)))
    counts, even = _counts(wanted), ",".join(map(str, place(layers, stages, chunks, "auto").parts))
    require(len(counts) == parts, "--stages", wanted, f"must name the {parts} parts of {cut}", f"for example {even}")
    allowed = f"must sum to --layers {layers}, not to {sum(counts)}"
    require(sum(counts) == layers, "--stages", wanted, allowed, f"for example {even}")
    return Placement(stages, chunks, counts)


def _counts(wanted: str) -> tuple[int, ...]:
    items = [item.strip() for item in wanted.split(",")]
    if not all(item.isdecimal() and int(item) > 0 for item in items):
        raise UserError(f'--stages {wanted}: must be "auto", or the layers of each stage, each at least 1, "7,8,8,7"')
    return tuple(int(item) for item in items)
