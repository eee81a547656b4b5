"""The best plans of a configuration; and the one that a run takes with --mesh auto.

found = search(config, find("h100"), devices=64)
found.plans[0].plan.apply(config)
"""

from collections.abc import Collection
from typing import Any

import jax

from jaxgpt.config import RunConfig
from jaxgpt.errors import require
from jaxgpt.planner import nothing, report, trial
from jaxgpt.planner.calibrate import calibrated
from jaxgpt.planner.hardware import Hardware, present
from jaxgpt.planner.legal import FREE, Space
from jaxgpt.planner.search import Ranking, dtype_of, rank
from jaxgpt.sharding import mesh
from jaxgpt.training.console import Console

SHOWN = 8
"""Plans that --mesh auto shows, and among which it tries."""


def search(config: RunConfig, hardware: Hardware, devices: int, kept: Collection[str] = (), top: int = 5) -> Ranking:
    """The `top` fastest plans of a configuration on so many devices of a kind, of each mesh the best alone.

    kept: names of planner.legal.FREE that are not to be chosen: they stay as the configuration has them. Where the mesh
    is kept and nothing fits it, the plan that needs least memory. Raises UserError where no plan is legal, or none fits
    any mesh, with the smallest change that would make one.
    """
    known, fix = "a plan chooses among the schedules that --schedule names", "leave it out, or train with a --mesh"
    require(not config.schedule_file, "--schedule-file", config.schedule_file, known, fix)
    space = Space(config, devices, hardware.name, frozenset(FREE) - frozenset(kept))
    found = rank(space, hardware, top)
    if not found.plans:
        raise nothing.legal(space)
    if not found.fits and "mesh" in space.free:
        raise nothing.fits(space, hardware, found.plans[0])
    return found


def here(config: RunConfig, devices: list[Any], measured: bool) -> Hardware:
    """The hardware that these devices are. measured: by what they do, not by what the table says."""
    found = present(devices)
    return calibrated(found, devices, dtype_of(config, found)) if measured else found


def auto(config: RunConfig, devices: list[Any], kept: Collection[str] | None, console: Console) -> RunConfig:
    """The configuration on the fastest mesh of the devices that are here, with what else is not kept chosen for it.

    kept: fields that stay as they are; None: all but the mesh. The plans predicted to be fastest are tried, a few steps
    each (planner.trial). Before that CPU devices are measured, since what they share is in no table; several processes
    go by the table, so that all try alike.
    """
    measured = devices[0].platform == "cpu" and jax.process_count() == 1
    if measured:
        console.say("--mesh auto: measures the devices that are here")
    hardware = here(config, devices, measured)
    found = search(config, hardware, len(devices), set(FREE if kept is None else kept) - {"mesh"}, top=SHOWN)
    for title, rows in report.tables(found, float(config.steps * config.global_batch * config.model.seq)):
        console.table(title, rows)
    first = found.plans[0]
    if trials := trial.run(found.plans, config, devices, console):
        console.table("tried on the devices that are here", trial.rows(trials))
        first = trials[0].estimate
    console.fallback(f"--mesh auto: {mesh.format_mesh(first.plan.sizes)}, {report.choices(first)}")
    return first.plan.apply(config)
