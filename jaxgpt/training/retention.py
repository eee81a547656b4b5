"""Which checkpoints stay: the last ones, every k-th, and the best; which one a user names. Needs no JAX."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from jaxgpt.errors import UserError
from jaxgpt.training import manifest
from jaxgpt.training.manifest import CHUNKS, PARTS, path, steps

LAST, BEST = "last", "best"
_NAMED = 8
"""Most steps that a message lists."""

Losses = Mapping[int, float | None]
"""Validation loss by step, None where there was no validation, of all checkpoints that are there."""


def kept(losses: Losses, last: int, every: int) -> dict[int, list[str]]:
    """The checkpoints that stay, each with the reasons: it is one of the `last`, its step is a multiple of `every` (0:
    none is kept for that), its loss is the least."""
    why: dict[int, list[str]] = {step: [] for step in sorted(losses)}
    for step in sorted(losses)[-last:]:
        why[step].append(f"of the last {last}" if last > 1 else LAST)
    for step in why:
        if every and step % every == 0:
            why[step].append(f"every {every}")
    if (least := best(losses)) is not None:
        why[least].append(BEST)
    return {step: reasons for step, reasons in why.items() if reasons}


def best(losses: Losses) -> int | None:
    """The step with the least loss, the later of two; None where none has one."""
    known = {step: value for step, value in losses.items() if value is not None}
    return min(known, key=lambda step: (known[step], -step)) if known else None


def losses_in(folder: Path) -> dict[int, float | None]:
    """The losses of the checkpoints of a folder."""
    return {step: manifest.loss(folder, step) for step in steps(folder)}


def find(folder: Path, wanted: str) -> int:
    """The step of the checkpoint that --step names: a number, last or best. Raises UserError where there is none."""
    there = steps(folder)
    if not there:
        raise UserError(f"{folder}: has no checkpoint")
    if wanted == LAST:
        return there[-1]
    if wanted == BEST:
        if (least := best(losses_in(folder))) is None:
            raise UserError(f"--step {BEST}: no checkpoint in {folder} has a validation loss; give a step, or {LAST}")
        return least
    if not re.fullmatch(r"[0-9]+", wanted):
        raise UserError(f"--step {wanted}: must be a step, {LAST} or {BEST}")
    if int(wanted) not in there:
        listed = [*map(str, there)]
        if len(listed) > _NAMED:
            listed = [*listed[: _NAMED - 1], "...", listed[-1]]
        raise UserError(f"--step {wanted}: {folder} has no checkpoint of that step; it has {', '.join(listed)}")
    return int(wanted)


def prune(folder: Path, losses: Losses, last: int, every: int) -> None:
    """Removes the checkpoints that do not stay."""
    for step in losses.keys() - kept(losses, last, every).keys():
        # Renamed first: a checkpoint half removed must not look like a complete one.
        doomed = path(folder, step).with_suffix(".partial")
        path(folder, step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clear_partial(folder: Path) -> list[Path]:
    """Removes what saves that were cut off have left, and nothing else. Nobody may be saving into the folder."""
    removed = []
    for entry in sorted(folder.glob("step-*.partial")):
        ours = re.fullmatch(r"step-\d{8,}\.partial", entry.name) and entry.is_dir() and not entry.is_symlink()
        if ours and all(part.name in PARTS or re.fullmatch(rf"{CHUNKS}\.\d+", part.name) for part in entry.iterdir()):
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
    return removed


def set_aside(folder: Path, step: int) -> Path:
    """Renames a damaged checkpoint, so that it is neither found nor overwritten. Returns its new path."""
    number, target = 1, path(folder, step).with_suffix(".damaged")
    while target.exists():
        number += 1
        target = path(folder, step).with_suffix(f".damaged-{number}")
    path(folder, step).rename(target)
    return target
