"""Layouts are data: one table says on which mesh axis each named dimension lies; all else is read from it.

ZeRO-3/FSDP is the row `embed -> fsdp`, Megatron's column and row splits are `heads`, `mlp` -> tensor, its vocabulary
split is `vocab -> tensor`. SBP signatures are the same table read per axis: S(i) where a dimension lies on it, else B.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import RunConfig
from jaxgpt.sharding.mesh import AXES

MANUAL = ("pipe", "data", "fsdp", "context")
"""Axes over which the step is manual: the program itself says what is communicated over them."""

BATCH = ("data", "fsdp")
"""Axes that split the samples of a batch."""

TENSOR = "tensor"

ZERO: dict[int, dict[str, tuple[str, ...]]] = {
    0: {"rest": ("fsdp",), "accumulated": ("fsdp",), "used": ("fsdp",)},
    1: {"rest": ("fsdp", "data"), "accumulated": ("fsdp",), "used": ("fsdp",)},
    2: {"rest": ("fsdp", "data"), "accumulated": ("fsdp", "data"), "used": ("fsdp",)},
    3: {"rest": ("fsdp", "data"), "accumulated": ("fsdp", "data"), "used": ("fsdp", "data")},
}
"""The stages of ZeRO (arXiv 1910.02054) on `data`, as rows: over which axes `embed` lies split, by what is held."""

Axis = str | tuple[str, ...] | None

PARAMETERS: dict[str, Axis] = {
    "layers": "pipe",
    "embed": "fsdp",  # and over data, as ZERO says
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
    "key": None,
}
"""Where the dimensions of activations lie. `seq` is the residual stream's sequence, `length` the same inside
attention and feed-forward layer."""


@dataclass(frozen=True)
class Layout:
    """The tables for one configuration on one mesh."""

    parameters: Mapping[str, Axis]
    activations: Mapping[str, Axis]
    kv_heads: int
    """Key-value heads as computed with: replicated up to the `tensor` axis where the model has fewer."""
    sequence: tuple[str, int] | None
    """The manual axis over which the sequence lies split, and its size, where that is more than one."""
    axes: tuple[str, ...]
    """The manual axes that have more than one device: those over which values differ and sums are taken."""
    rest: tuple[str, ...]
    """Axes over which `embed`, and with it every matrix, lies split at rest (parameters and optimizer state) ..."""
    accumulated: tuple[str, ...]
    """... gradients while they are accumulated ..."""
    used: tuple[str, ...]
    """... and weights between their uses, so that each block gathers them. Each is the first axes of the one before."""

    @staticmethod
    def of(config: RunConfig, sizes: Mapping[str, int]) -> "Layout":
        """The tables on a mesh: without its axes of one device, on which S and B are the same, and with key-value
        heads replicated where there are fewer of them than tensor devices."""
        rows = dict(PARAMETERS)
        if config.model.kv < sizes["tensor"]:
            rows["kv_heads"] = None
        rest, accumulated, used = (
            tuple(axis for axis in ZERO[config.zero][kind] if sizes[axis] > 1)
            for kind in ("rest", "accumulated", "used")
        )
        rows["embed"] = rest or None
        activations = dict(ACTIVATIONS)
        if config.sequence_parallel:
            activations["seq"] = ("context", "tensor")
        return Layout(
            {d: _present(axis, sizes) for d, axis in rows.items()},
            {d: _present(axis, sizes) for d, axis in activations.items()},
            max(config.model.kv, sizes["tensor"]),
            ("context", sizes["context"]) if sizes["context"] > 1 else None,
            tuple(axis for axis in MANUAL if sizes[axis] > 1),
            rest,
            accumulated,
            used,
        )

    def stored(self, dims: tuple[str, ...]) -> PartitionSpec:
        """The whole layout of a parameter at rest."""
        return PartitionSpec(*(self.parameters[d] for d in dims))

    def manual(self, dims: tuple[str, ...]) -> PartitionSpec:
        """The part of a parameter's layout over which the step is manual."""
        return PartitionSpec(*(self.parameters[d] if self.parameters[d] != TENSOR else None for d in dims))

    def typed(self) -> dict[str, str | None]:
        """Dimension name -> axis in the types, inside the step (see sharding.named)."""
        rows = {**self.parameters, **self.activations}
        return {d: TENSOR if TENSOR in _axes(axis) else None for d, axis in rows.items()}

    def batch(self) -> PartitionSpec:
        """Layout of a step's tokens, [microbatch, batch, seq]."""
        return PartitionSpec(*(self.activations[d] for d in ("microbatch", "batch", "length")))


def _present(axis: Axis, sizes: Mapping[str, int]) -> Axis:
    if isinstance(axis, tuple):
        return tuple(a for a in axis if sizes[a] > 1) or None
    return axis if axis is not None and sizes[axis] > 1 else None


def _axes(entry: Axis) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def signature(spec: PartitionSpec) -> dict[str, str]:
    """SBP signature by mesh axis: "S(dimension)" or "B" (arXiv 2110.15032)."""
    found = dict.fromkeys(AXES, "B")
    for position, entry in enumerate(spec):
        for axis in _axes(entry):
            found[axis] = f"S({position})"
    return found


def split_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a layout uses."""
    return tuple(axis for entry in spec for axis in _axes(entry))


def sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The layout on a mesh."""
    return NamedSharding(mesh, spec)
