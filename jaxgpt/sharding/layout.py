"""A layout: the table of rows for one configuration on one mesh, as PartitionSpecs (as signatures: sharding.sbp)."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxgpt.config import RunConfig
from jaxgpt.sharding.named import Sequence
from jaxgpt.sharding.rows import MANUAL, TENSOR, Axes, Rows, rows


@dataclass(frozen=True)
class Layout:
    """Where everything of one configuration lies on one mesh."""

    rows: Rows
    kv_heads: int
    """Key-value heads as computed with: replicated up to the `tensor` axis where the model has fewer."""
    sequence: Sequence | None
    """How the sequence lies split over a manual axis, if it does."""
    axes: Axes
    """The manual axes that have more than one device: those over which values differ and sums are taken."""

    @staticmethod
    def of(config: RunConfig, sizes: Mapping[str, int]) -> "Layout":
        """The layout on a mesh of these sizes. Raises UserError where --layout says what cannot be."""
        found = rows(config, sizes)
        context = sizes["context"]
        return Layout(
            found,
            max(config.model.kv, sizes[TENSOR]) if found.activations["heads"] else config.model.kv,
            Sequence("context", context, _form(config, sizes)) if context > 1 else None,
            tuple(axis for axis in MANUAL if sizes[axis] > 1),
        )

    def stored(self, dims: tuple[str, ...]) -> PartitionSpec:
        """The whole layout of a parameter at rest."""
        return PartitionSpec(*(_entry(self.rows.parameters[d]) for d in dims))

    def manual(self, dims: tuple[str, ...]) -> PartitionSpec:
        """The part of a parameter's layout over which the step is manual."""
        axes = (self.rows.parameters[d] for d in dims)
        return PartitionSpec(*(_entry(tuple(axis for axis in each if axis != TENSOR)) for each in axes))

    def typed(self) -> dict[str, str | None]:
        """Dimension name -> axis in the types, inside the step (see sharding.named)."""
        both = self.rows.parameters | self.rows.activations
        return {d: TENSOR if TENSOR in axes else None for d, axes in both.items()}

    def shared(self) -> dict[str, str]:
        """Dimension name -> manual axis over which mathematics finds it split: the vocabulary's over `pipe`."""
        return {"vocab": "pipe"} if "pipe" in self.axes else {}

    def batch(self) -> PartitionSpec:
        """Layout of a step's tokens, [microbatch, batch, seq]."""
        return PartitionSpec(*(_entry(self.rows.activations[d]) for d in ("microbatch", "batch", "length")))


def _form(config: RunConfig, sizes: Mapping[str, int]) -> str:
    """How attention meets the other parts of the sequence: by default a ring, which cannot run in a pipeline."""
    if config.context_attention == "auto":
        return "gather" if sizes["pipe"] > 1 else "ring"
    return config.context_attention


def _entry(axes: Axes) -> str | Axes | None:
    return axes[0] if len(axes) == 1 else axes or None


def _axes(entry: str | Axes | None) -> Axes:
    return (entry,) if isinstance(entry, str) else entry or ()


def split_axes(spec: PartitionSpec) -> Axes:
    """The mesh axes that a layout uses."""
    return tuple(axis for entry in spec for axis in _axes(entry))
