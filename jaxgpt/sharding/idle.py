"""What was asked for and does nothing on a mesh: said, so that nobody takes it for done."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxgpt.config import RunConfig
from jaxgpt.sharding.rows import overrides, rows


def idle(config: RunConfig, sizes: Mapping[str, int]) -> list[str]:
    """A note for each flag that changes nothing on a mesh of these sizes. Raises UserError where --layout says what
    cannot be."""
    return [*_without_axis(config, sizes), *_overruled(config, sizes), *_same_rows(config, sizes)]


def _without_axis(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Flags of an axis that the mesh lacks, or that another one of the same axis takes the place of."""
    flags = (
        ("pipe", f"--schedule {config.schedule}", config.schedule != "1f1b"),
        ("pipe", f"--schedule-file {config.schedule_file}", bool(config.schedule_file)),
        ("data", f"--zero {config.zero}", config.zero > 0),
        ("tensor", "--sequence-parallel", config.sequence_parallel),
        ("context", f"--context-attention {config.context_attention}", config.context_attention != "auto"),
    )
    for axis, flag, asked in flags:
        if asked and sizes[axis] == 1:
            yield f"{flag}: does nothing without a {axis} axis"
    if config.schedule_file and config.schedule != "1f1b" and sizes["pipe"] > 1:
        yield f"--schedule {config.schedule}: does nothing beside --schedule-file {config.schedule_file}"


def _overruled(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Flags whose row is changed by hand."""
    given = overrides(config.layout)
    flags: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("data", f"--zero {config.zero}", "embed", {"zero": 0}),
        ("tensor", "--sequence-parallel", "seq", {"sequence_parallel": False}),
    )
    for axis, flag, dim, without in flags:
        plain = replace(config, **without)
        changed = rows(config, sizes)
        by_hand = rows(replace(config, layout=""), sizes) != changed
        if plain != config and sizes[axis] > 1 and by_hand and rows(plain, sizes) == changed:
            yield f"{flag}: does nothing, since --layout {_said(dim, given[dim])} takes its place"


def _same_rows(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Rows changed by hand to what they are."""
    given, changed = overrides(config.layout), rows(config, sizes)
    for dim, axes in given.items():
        others = ",".join(_said(*each) for each in given.items() if each[0] != dim)
        if dim == "vocab" and not axes and sizes["pipe"] > 1:
            yield "--layout vocab=none: over pipe the vocabulary lies split all the same"
        elif rows(replace(config, layout=others), sizes) == changed:
            yield f"--layout {_said(dim, axes)}: changes nothing on this mesh"


def _said(dim: str, axes: tuple[str, ...]) -> str:
    return f"{dim}={'+'.join(axes) or 'none'}"
