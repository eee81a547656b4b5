"""What the backward computes again rather than keeps, as --recompute says it: "none", "full", "full:12"."""

import functools
from typing import Literal, NamedTuple, get_args

from jaxgpt.errors import UserError, require

Kind = Literal["none", "selective", "full"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In this order more is computed again and less is kept; model.gpt says what."""


class Recomputation(NamedTuple):
    """A kind, and how many layers it is for."""

    kind: Kind
    layers: int | None
    """Layers of each part of the model that compute again, from the part's first; its others keep everything. None:
    all of them."""

    def of(self, rows: int) -> int:
        """Layers that compute again in a part of so many."""
        if self.kind == "none":
            return 0
        return rows if self.layers is None else min(self.layers, rows)


@functools.cache
def recomputation(said: str) -> Recomputation:
    """Reads "none", or "selective" or "full", both with a number of layers behind a colon or without. A part is what
    a stage runs at once: the whole model without a pipeline, a stage's layers with one, and each of its virtual stages.

    Raises UserError.
    """
    for kind in KINDS:
        if said == kind:
            return Recomputation(kind, None)
        count = said.removeprefix(f"{kind}:")
        if kind != "none" and count != said and count.isdecimal() and str(int(count)) == count != "0":
            return Recomputation(kind, int(count))
    raise UserError(
        f"--recompute {said}: must be none, selective or full; or selective:N or full:N, N at least 1, for the first N "
        "layers of each stage alone"
    )


def check(said: str, layers: int) -> None:
    """Refuses what is none, or names more layers than the model has. Raises UserError."""
    count = recomputation(said).layers
    most = f"must name at most the {layers} layers of the model"
    require(count is None or count <= layers, "--recompute", said, most, f"or take {said.partition(':')[0]}, for all")


def counted(kind: Kind, layers: int, rows: int) -> str:
    """How --recompute says that so many layers of parts of `rows` compute again."""
    if layers == 0:
        return "none"
    return kind if layers == rows else f"{kind}:{layers}"
