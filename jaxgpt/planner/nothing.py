"""Why there is no plan: the constraint that fails, and the smallest changes of which each would make one."""

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from jaxgpt.config import RunConfig
from jaxgpt.errors import UserError
from jaxgpt.planner import memory
from jaxgpt.planner.hardware import Hardware, table
from jaxgpt.planner.legal import FREE, Space
from jaxgpt.planner.plan import Estimate
from jaxgpt.planner.search import smallest
from jaxgpt.sharding import mesh
from jaxgpt.training.console import size

NEIGHBOURS = 64
"""How far from the number of devices others are tried."""
MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
"""Of the devices, tried where memory lacks."""
ROWS = ("stages", "layout", "context_attention")
"""What a configuration can pin beside FREE."""


def legal(space: Space) -> UserError:
    """What to say where no plan is legal."""
    plain = _plain(space)
    if "mesh" not in space.free:
        try:
            mesh.check(plain, mesh.parse(plain.mesh, space.devices))
        except UserError as error:
            return error
    every = mesh.factorisations(space.devices)
    said = [list(mesh.complaints(plain, sizes)) for sizes in every]
    nearest = min(said, key=lambda each: (len(each), not each[:1] or not each[0].startswith("--global-batch")))
    fails = nearest[0] if nearest else "the schedule does not go with the microbatches"
    changes = [*_released(space), *_batches(space), *_neighbours(space)]
    fix = f"smallest change: {' or '.join(changes)}" if changes else "no single change makes one"
    return UserError(f"--devices {space.devices}: no plan is legal; the nearest to it: {fails}; {fix}")


def fits(space: Space, hardware: Hardware, least: Estimate) -> UserError:
    """What to say where no plan fits. least: the one that needs least memory."""
    named = mesh.format_mesh(least.plan.sizes)
    needs = f"{size(least.peak_bytes)} a device of {size(least.capacity)}, on {named} at the least"
    changes = [*_released(space, hardware), *_more(space, hardware, least), *_larger(hardware, least)]
    fix = f"smallest change: {' or '.join(changes)}" if changes else "no single change makes one fit"
    return UserError(f"--hardware {hardware.name}: no plan fits {space.devices}: memory, {needs}; {fix}")


def _plain(space: Space) -> RunConfig:
    """The configuration with what is free as plain as can be."""
    plain: dict[str, Any] = {f.name: f.default for f in fields(RunConfig) if f.name in space.free and f.name in FREE}
    return replace(space.config, **plain | {"mesh": space.config.mesh})


def _works(space: Space, hardware: Hardware | None) -> bool:
    """Whether some plan is legal, and fits the hardware if one is given."""
    if hardware is None:
        return next(space.meshes(), None) is not None
    found = smallest(space, hardware)
    return found is not None and found.fits


def _released(space: Space, hardware: Hardware | None = None) -> Iterator[str]:
    """Flags that are better left out."""
    for name in FREE:
        flag = "--" + name.replace("_", "-")
        if name not in space.free and _works(replace(space, free=space.free | {name}), hardware):
            yield f"without {flag} {getattr(space.config, name)}"
    for name in ROWS:
        default = getattr(RunConfig(), name)
        said = getattr(space.config, name)
        if said != default and _works(replace(space, config=replace(space.config, **{name: default})), hardware):
            yield f"without --{name.replace('_', '-')} {said}"


def _batches(space: Space) -> Iterator[str]:
    """The nearest global batch that can be divided."""
    batch, n = space.config.global_batch, space.devices
    parts = [part for part in range(1, n + 1) if n % part == 0]
    near = {max(1, batch // part) * part for part in parts} | {-(-batch // part) * part for part in parts}
    for other in sorted(near - {batch}, key=lambda each: (abs(each - batch), each)):
        if _works(replace(space, config=replace(space.config, global_batch=other)), None):
            yield f"--global-batch {other}"
            return


def _neighbours(space: Space) -> Iterator[str]:
    """The nearest number of devices for which a plan is legal, where the mesh is open."""
    if "mesh" not in space.free:
        return
    for away in itertools.chain.from_iterable((-step, step) for step in range(1, NEIGHBOURS)):
        other = space.devices + away
        if other >= 1 and _works(replace(space, devices=other), None):
            yield f"--devices {other}"
            return


def _more(space: Space, hardware: Hardware, least: Estimate) -> Iterator[str]:
    """The least multiple of the devices on which a plan fits. No plan divides what all devices hold better than
    evenly."""
    for times in MULTIPLES:
        more = times * space.devices
        if "mesh" not in space.free or more > mesh.MOST_DEVICES:
            return
        if not memory.fits(least.peak_bytes // times, hardware):
            continue
        if _works(replace(space, devices=more), hardware):
            yield f"--devices {more}"
            return


def _larger(hardware: Hardware, least: Estimate) -> Iterator[str]:
    """The kind of device, as fast or faster, with the least memory in which a plan fits."""
    for other in sorted(table().values(), key=lambda each: each.memory):
        if other.peak("bf16") >= hardware.peak("bf16") and memory.fits(least.peak_bytes, other):
            yield f"--hardware {other.name}"
            return
