"""jaxgpt plan: plans for hardware that need not be there, found, told, drawn, saved and verified."""

import dataclasses
import json
import math
import shlex
from collections.abc import Collection
from typing import Any

from jaxgpt.config import RunConfig
from jaxgpt.errors import UserError, require
from jaxgpt.flags import PlanFlags
from jaxgpt.planner import absent, nothing, report, saved
from jaxgpt.planner.choose import here, search
from jaxgpt.planner.hardware import Hardware, find
from jaxgpt.planner.plan import Estimate
from jaxgpt.planner.search import Ranking, dtype_of
from jaxgpt.planner.verify import CPU, Verified, target, verify
from jaxgpt.sharding import mesh
from jaxgpt.training.console import Console
from jaxgpt.training.program import Program


def plan(config: RunConfig, flags: PlanFlags, explicit: Collection[str]) -> int:
    """jaxgpt plan. Returns its exit status: 1 where the first plan does not fit."""
    require(flags.top >= 1, "--top", flags.top, "must be at least 1")
    count = float(config.steps * config.global_batch * config.model.seq) if flags.tokens is None else flags.tokens
    require(0 < count < math.inf, "--tokens", flags.tokens, "must be above 0 and finite")
    kept = {*explicit} if config.mesh != mesh.AUTO else {*explicit} - {"mesh"}
    hardware, devices = _devices(config, flags, "mesh" in kept)
    named = target(hardware) if flags.verify else None  # before anything is searched for
    found = search(config, hardware, devices, kept, flags.top)
    checked = _verified(found.plans[0], config, hardware, named) if named is not None else None
    if flags.json:
        print(json.dumps(_document(found, count, checked), indent=2))
    else:
        _tell(found, count, hardware, checked)
    if flags.picture is not None:
        report.draw(found, flags.picture)
    fits = found.fits if checked is None else checked.fits
    if flags.save is not None:
        require(fits, "--save", flags.save, "is not written, since the plan does not fit")
        saved.write(flags.save, found.plans[0], config)
        if not flags.json:
            Console().say(f"plan 1 is saved; to train by it: jaxgpt train --plan {shlex.quote(str(flags.save))}")
    return 0 if fits else 1


def _devices(config: RunConfig, flags: PlanFlags, mesh_kept: bool) -> tuple[Hardware, int]:
    """What is planned for, and how many."""
    if flags.devices is not None:
        most = mesh.MOST_DEVICES
        require(1 <= flags.devices <= most, "--devices", flags.devices, f"must be at least 1 and at most {most}")
    named = mesh.devices_named(config.mesh) if mesh_kept else None
    count = flags.devices or named
    if flags.hardware is not None:
        hardware = find(flags.hardware)
        if count is None:
            raise UserError(f"--hardware {flags.hardware}: how many is not said; give --devices, or --mesh in full")
        measures = "measures devices that are here; leave --hardware out"
        require(not flags.calibrate, "--calibrate", f"with --hardware {flags.hardware}", measures)
        return hardware, count
    present, _ = mesh.prepare_devices(count if flags.calibrate else None)
    return here(config, present, measured=flags.calibrate), count or len(present)


def _verified(first: Estimate, config: RunConfig, hardware: Hardware, named: str) -> Verified:
    """The plan's train step compiled for as many devices as it is for, which need not be here."""
    config = dataclasses.replace(first.plan.apply(config), dtype=dtype_of(config, hardware))
    if named == CPU:
        devices = mesh.prepare_devices(first.plan.devices)[0]
    else:
        devices = absent.devices(named, first.plan.devices, "--verify")
    return verify(first, Program(config, mesh.build(first.plan.sizes, devices)), named)


def _tell(found: Ranking, tokens: float, hardware: Hardware, checked: Verified | None) -> None:
    console = Console()
    for title, rows in report.tables(found, tokens):
        console.table(title, rows)
    if checked is not None:
        console.table(f"the first plan, compiled; attention kernel {checked.kernel}", checked.rows())
        told = "fits" if checked.fits else "DOES NOT FIT"
        console.say(f"verified: {told}, as compiled for {checked.target}")
    elif not found.fits:
        console.say(str(nothing.fits(found.space, hardware, found.plans[0])))


def _document(found: Ranking, tokens: float, checked: Verified | None) -> dict[str, Any]:
    """The ranking as JSON; of a verified plan the compiler's peak stands in place of the predicted one."""
    document = report.document(found, tokens)
    if checked is not None:
        document["plans"][0] |= {"peak_bytes": checked.peak, "fits": checked.fits, "verified": checked.to_json()}
    return document
