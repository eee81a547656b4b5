"""Layouts are data: one table says on which mesh axis each named dimension lies; all else is read from it.

ZeRO-3/FSDP is the row `embed -> fsdp`, Megatron's column and row splits are `heads`, `mlp` -> tensor, its vocabulary
split is `vocab -> tensor`. SBP signatures are the same table read per axis: S(i) where a dimension lies on it, else B.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import ModelConfig
from jaxgpt.sharding.mesh import AXES

MANUAL = ("pipe", "data", "fsdp", "context")
"""Axes over which the step is manual: the program itself says what is communicated over them."""

BATCH = ("data", "fsdp")
"""Axes that split the samples of a batch."""

Axis = str | tuple[str, ...] | None

PARAMETERS: dict[str, Axis] = {
    "layers": "pipe",
    "embed": "fsdp",
    "norm": None,  # vectors of the residual stream's width: too small to be worth a gather each
    "heads": "tensor",
    "kv_heads": "tensor",
    "group": None,
    "head": None,
    "branch": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "positions": None,
}
"""Where the dimensions of parameters, gradients and optimizer state lie."""

ACTIVATIONS: dict[str, Axis] = {
    "microbatch": None,
    "batch": BATCH,
    "seq": "context",
    "length": "context",
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "group": None,
    "head": None,
    "branch": None,
    "mlp": "tensor",
    "vocab": "tensor",
}
"""Where the dimensions of activations lie. `seq` is the residual stream's sequence, `length` the same inside
attention and feed-forward layer."""


@dataclass(frozen=True)
class Layout:
    """The tables for one model on one mesh."""

    parameters: Mapping[str, Axis]
    activations: Mapping[str, Axis]
    kv_heads: int
    """Key-value heads as computed with: replicated up to the `tensor` axis where the model has fewer."""
    axes: tuple[str, ...]
    """The manual axes that have more than one device: those over which values differ and sums are taken."""

    @staticmethod
    def of(config: ModelConfig, sizes: Mapping[str, int]) -> "Layout":
        """The tables on a mesh: without its axes of one device, on which S and B are the same, and with key-value
        heads replicated where there are fewer of them than tensor devices."""
        fewer = config.kv < sizes["tensor"]
        parameters = PARAMETERS | ({"kv_heads": None} if fewer else {})
        return Layout(
            {d: _present(axis, sizes) for d, axis in parameters.items()},
            {d: _present(axis, sizes) for d, axis in ACTIVATIONS.items()},
            sizes["tensor"] if fewer else config.kv,
            tuple(axis for axis in MANUAL if sizes[axis] > 1),
        )

    def stored(self, dims: tuple[str, ...]) -> PartitionSpec:
        """The whole layout of a parameter at rest."""
        return PartitionSpec(*(self.parameters[d] for d in dims))

    def manual(self, dims: tuple[str, ...]) -> PartitionSpec:
        """The part of a parameter's layout over which the step is manual."""
        return PartitionSpec(*(axis if axis in MANUAL else None for axis in (self.parameters[d] for d in dims)))

    def typed(self) -> dict[str, str | None]:
        """Dimension name -> axis in the types, inside the step (see sharding.named)."""
        rows = {**self.parameters, **self.activations}
        return {d: "tensor" if axis == "tensor" else None for d, axis in rows.items()}

    def batch(self) -> PartitionSpec:
        """Layout of a step's tokens, [microbatch, batch, seq]."""
        return PartitionSpec(*(self.activations[d] for d in ("microbatch", "batch", "seq")))


def _present(axis: Axis, sizes: Mapping[str, int]) -> Axis:
    if isinstance(axis, tuple):
        return tuple(a for a in axis if sizes[a] > 1) or None
    return axis if axis is not None and sizes[axis] > 1 else None


def signature(spec: PartitionSpec) -> dict[str, str]:
    """SBP signature by mesh axis: "S(dimension)" or "B" (arXiv 2110.15032)."""
    found = dict.fromkeys(AXES, "B")
    for position, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            found[axis] = f"S({position})"
    return found


def split_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a layout uses."""
    return tuple(a for entry in spec if entry is not None for a in ((entry,) if isinstance(entry, str) else entry))


def sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The layout on a mesh."""
    return NamedSharding(mesh, spec)
