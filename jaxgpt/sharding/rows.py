"""The layout table: on which mesh axes each named dimension lies. All else about layouts is read from these rows.

Megatron's column and row splits are `heads`, `mlp` -> tensor, its vocabulary split `vocab -> tensor`, sequence
parallelism `seq -> tensor`, context parallelism `seq`, `length` -> context, FSDP and ZeRO the rows of `embed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxgpt.config import RunConfig
from jaxgpt.errors import UserError

MANUAL = ("pipe", "data", "fsdp", "context")
"""Axes over which the step is manual: the program itself says what is communicated over them."""

TENSOR = "tensor"
"""The axis in the types."""

AXES = ("pipe", "data", "fsdp", "context", "tensor")
"""Mesh axes as they are laid on devices, from the outermost, which talks least, to the innermost."""

Axes = tuple[str, ...]

PARAMETERS: dict[str, Axes] = {
    "layers": ("pipe",),
    "embed": ("fsdp",),  # and over data, as ZERO says
    "norm": (),  # vectors of the residual stream's width: too small to be worth a gather each
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "group": (),
    "head": (),
    "branch": (),
    "mlp": ("tensor",),
    "vocab": ("pipe", "tensor"),
    "positions": (),
}
"""Where the dimensions of parameters, gradients and optimizer state lie."""

ACTIVATIONS: dict[str, Axes] = {
    "microbatch": (),
    "batch": ("data", "fsdp"),
    "seq": ("context",),  # and over tensor, with sequence parallelism
    "length": ("context",),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "group": (),
    "head": (),
    "branch": (),
    "mlp": ("tensor",),
    "vocab": ("pipe", "tensor"),
    "key": (),
}
"""Where the dimensions of activations lie. `seq` is the residual stream's sequence, `length` the same inside
attention, feed-forward layer and head."""

ZERO: dict[int, dict[str, Axes]] = {
    0: {"rest": ("fsdp",), "accumulated": ("fsdp",), "used": ("fsdp",)},
    1: {"rest": ("fsdp", "data"), "accumulated": ("fsdp",), "used": ("fsdp",)},
    2: {"rest": ("fsdp", "data"), "accumulated": ("fsdp", "data"), "used": ("fsdp",)},
    3: {"rest": ("fsdp", "data"), "accumulated": ("fsdp", "data"), "used": ("fsdp", "data")},
}
"""The stages of ZeRO (arXiv 1910.02054) on `data`, as rows: over which axes `embed` lies split, by what is held."""

CHOICES: dict[str, tuple[Axes, ...]] = {
    "vocab": ((), ("tensor",)),
    "heads": ((), ("tensor",)),
    "mlp": ((), ("tensor",)),
    "seq": ((), ("tensor",)),
    "embed": ((), ("fsdp",), ("data",), ("fsdp", "data")),
}
"""The rows that a user may change, and to what. `heads` takes the key-value heads with it; `embed` is where matrices
lie split at rest, accumulated and between uses; `seq` the residual stream's own split, beside context."""


def overrides(text: str) -> dict[str, Axes]:
    """ "mlp=none,embed=fsdp+data" as rows. Raises UserError naming dimension, axis and what is allowed."""
    rows: dict[str, Axes] = {}
    for item in text.split(",") if text.strip() else []:
        dim, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not dim:
            raise UserError(f"--layout {text}: {item!r} is not dimension=axes, such as mlp=none or embed=fsdp+data")
        if dim not in CHOICES:
            known = dim in PARAMETERS or dim in ACTIVATIONS
            problem = "cannot be changed by hand" if known else "is not a dimension"
            raise UserError(f"--layout {text}: {dim!r} {problem}; those that can be changed are {', '.join(CHOICES)}")
        if dim in rows:
            raise UserError(f"--layout {text}: {dim} is given twice; name each dimension once")
        axes = () if value == "none" else tuple(axis.strip() for axis in value.split("+"))
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise UserError(f"--layout {text}: {unknown[0]!r} is not a mesh axis; known are {', '.join(AXES)}, or none")
        if len(set(axes)) < len(axes):
            raise UserError(f"--layout {text}: {dim} cannot lie twice on one axis; name each axis once")
        if axes not in CHOICES[dim]:
            allowed = " or ".join("+".join(choice) or "none" for choice in CHOICES[dim])
            raise UserError(f"--layout {text}: {dim} cannot lie on {value}; allowed are {allowed}")
        rows[dim] = axes
    return rows


@dataclass(frozen=True)
class Rows:
    """The table of one configuration on one mesh, without axes of one device, on which S and B are the same."""

    parameters: dict[str, Axes]
    activations: dict[str, Axes]
    rest: Axes
    """Axes over which `embed`, and with it every matrix, lies split at rest (parameters and optimizer state) ..."""
    accumulated: Axes
    """... gradients while they are accumulated ..."""
    used: Axes
    """... and weights between their uses, so that each block gathers them. Each is a beginning of the one before."""


def rows(config: RunConfig, sizes: Mapping[str, int]) -> Rows:
    """The rows that a configuration says: the tables, ZeRO's stage, sequence parallelism, and what a user changed."""
    given = overrides(config.layout)
    parameters, activations = dict(PARAMETERS), dict(ACTIVATIONS)
    tensor_seq = given.get("seq", ("tensor",) if config.sequence_parallel else ())
    activations["seq"] = (*ACTIVATIONS["seq"], *tensor_seq)
    split = {dim: axes for dim, axes in given.items() if dim in ("heads", "mlp")}
    if "vocab" in given:
        split["vocab"] = ("pipe", *given["vocab"])
    if "heads" in split:
        split["kv_heads"] = split["heads"]
    parameters |= split
    activations |= split
    if config.model.kv < sizes[TENSOR]:
        parameters["kv_heads"] = ()  # each device's head is made from the whole
    embed = dict.fromkeys(ZERO[0], given["embed"]) if "embed" in given else ZERO[config.zero]
    parameters["embed"] = embed["rest"]

    def present(table: Mapping[str, Axes]) -> dict[str, Axes]:
        return {dim: tuple(axis for axis in axes if sizes[axis] > 1) for dim, axes in table.items()}

    return Rows(present(parameters), present(activations), **present(embed))
