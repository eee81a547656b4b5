"""What a checkpoint's folder says of itself, and how one is known that cannot be trusted. Needs no JAX.

    checkpoints/step-00000100/
        arrays/params/blocks.mlp.weight/    zarr3, in logical shapes: without padding, whatever the mesh
        manifest.json                       step, validation loss, names, shapes, types, and what the caller adds
        CRC32C                              of each file in arrays/, the checksums of its chunks, in order
        SHA256SUMS                          of manifest.json, CRC32C and every zarr.json; `sha256sum -c` reads it

A folder of that name is complete; one that is being written ends in `.partial`. Chunks carry their own checksums.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.training import zarr
from jaxgpt.training.zarr import Sums

FORMAT = 2
MANIFEST, CHUNKS, SUMS = "manifest.json", "CRC32C", "SHA256SUMS"
PARTS = ("arrays", MANIFEST, CHUNKS, SUMS)
Shape = tuple[int, ...]


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be trusted; the one before it may be good."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    loss: float | None
    """Of the validation at that step, nats a token; None where there was none."""
    arrays: dict[str, tuple[Shape, np.dtype]]
    """Stored shape, without padding, and type by name."""
    meta: dict[str, Any]
    """What the caller added: samples consumed, configuration."""


def path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def write(partial: Path, manifest: Manifest, pieces: int) -> None:
    """Writes the three files beside the arrays; the list of chunks is put together from its pieces (write_sums)."""
    arrays = {name: {"shape": list(shape), "dtype": str(dtype)} for name, (shape, dtype) in manifest.arrays.items()}
    fields = {"format": FORMAT, "step": manifest.step, "loss": manifest.loss, "meta": manifest.meta, "arrays": arrays}
    _write_synced(partial / MANIFEST, json.dumps(fields, indent=1).encode())
    parts = [partial / f"{CHUNKS}.{number}" for number in range(pieces)]
    _write_synced(partial / CHUNKS, b"".join(part.read_bytes() for part in parts))
    for part in parts:
        part.unlink()
    names = [MANIFEST, CHUNKS, *map(_described, manifest.arrays)]
    _write_synced(partial / SUMS, b"".join(_sum_line(partial, name) for name in names))


def write_sums(partial: Path, piece: int, sums: Mapping[str, Sums]) -> None:
    """Writes the checksums of the files of each array that this process has written, and sees them onto the disk."""
    lines = (f"{listed}  arrays/{name}/{file}\n" for name, files in sums.items() for file, listed in files.items())
    _write_synced(partial / f"{CHUNKS}.{piece}", "".join(lines).encode())


def read(folder: Path, step: int) -> Manifest:
    """What the checkpoint of a step says of itself, its checksums proved. Raises DamagedCheckpoint, UserError."""
    for file, wrong in complaints(folder, step):
        raise DamagedCheckpoint(f"{file}: {wrong}")
    return parse(folder, step)


def parse(folder: Path, step: int) -> Manifest:
    """What a checkpoint says of itself, unproved. Raises UserError for a checkpoint of another version."""
    where = path(folder, step)
    fields = json.loads((where / MANIFEST).read_bytes())
    if fields["format"] != FORMAT:
        raise UserError(
            f"{where}: format {fields['format']}, but this jaxgpt reads {FORMAT}; use the one that wrote it"
        )
    arrays = {name: (tuple(a["shape"]), zarr.dtype_named(a["dtype"])) for name, a in fields["arrays"].items()}
    return Manifest(fields["step"], fields["loss"], arrays, fields["meta"])


def read_sums(folder: Path, step: int) -> dict[str, Sums]:
    """The checksums of the chunks of each array's files, as the checkpoint's list has them."""
    sums: dict[str, Sums] = {}
    for line in (path(folder, step) / CHUNKS).read_text(encoding="utf-8").splitlines():
        listed, _, file = line.partition("  ")
        array, _, name = file.removeprefix("arrays/").rpartition("/c")
        sums.setdefault(array, {})[f"c{name}"] = listed
    return sums


def loss(folder: Path, step: int) -> float | None:
    """The validation loss in a checkpoint; None also where its manifest cannot be trusted."""
    try:
        return None if _manifest_complaint(folder, step) else parse(folder, step).loss
    except (OSError, UserError):
        return None


def complaints(folder: Path, step: int) -> Iterator[tuple[Path, str]]:
    """The files that say what a checkpoint holds and are not as they were written, and what is wrong with each.

    Raises UserError for a checkpoint of another version.
    """
    where = path(folder, step)
    untold = _manifest_complaint(folder, step)
    if untold:
        yield untold
    if not (where / SUMS).is_file():
        return
    lines = (where / SUMS).read_bytes().splitlines(keepends=True)
    if wrong := _difference(where, CHUNKS, b"".join(lines[1:2])):
        yield wrong
    if untold:
        return
    arrays = parse(folder, step).arrays
    if len(lines) != len(arrays) + 2:
        yield where / SUMS, "is not the list of this checkpoint's files"
        return
    for line, name in zip(lines[2:], arrays, strict=True):
        if wrong := _difference(where, _described(name), line, f"array {name} "):
            yield wrong


def _manifest_complaint(folder: Path, step: int) -> tuple[Path, str] | None:
    where = path(folder, step)
    try:
        with (where / SUMS).open("rb") as file:
            first = file.readline()
    except OSError as error:
        return where / SUMS, f"is damaged ({error.strerror})"
    if wrong := _difference(where, MANIFEST, first):
        return wrong
    if (said := parse(folder, step).step) != step:
        return where / MANIFEST, f"is of step {said}"
    return None


def _described(array: str) -> str:
    return f"arrays/{array}/zarr.json"


def _sum_line(where: Path, file: str) -> bytes:
    return f"{hashlib.sha256((where / file).read_bytes()).hexdigest()}  {file}\n".encode()


def _difference(where: Path, file: str, line: bytes, whose: str = "") -> tuple[Path, str] | None:
    try:
        if line == _sum_line(where, file):
            return None
    except OSError as error:
        return where / file, f"{whose}is damaged ({error.strerror})"
    return where / file, f"{whose}differs from its checksum in {SUMS}"


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
