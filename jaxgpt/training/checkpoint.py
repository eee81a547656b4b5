"""Checkpoints: split arrays saved in the background, committed by one rename, and opened on any mesh.

    checkpoints/step-00000100/
        arrays/params/blocks.mlp.weight/    zarr3, in logical shapes: without padding, whatever the mesh
        manifest.json                       step, names, shapes, types, and what the caller adds
        SHA256SUMS                          of manifest.json and of every zarr.json; `sha256sum -c` reads it

A folder of that name is complete; one that is being written ends in `.partial`. Chunks carry their own checksums.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.training import zarr

FORMAT = 1
PARTS = ("arrays", "manifest.json", "SHA256SUMS")
SAVING = 3600.0
"""Seconds for which processes wait for each other in a save."""
Shape = tuple[int, ...]
Rows = tuple[int, ...]


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be trusted; the one before it may be good."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    arrays: dict[str, tuple[Shape, np.dtype]]
    """Stored shape, without padding, and type by name."""
    meta: dict[str, Any]
    """What the caller added: samples consumed, configuration."""


@dataclass(frozen=True)
class _Held:
    """One array off the devices: the parts that this process writes."""

    shape: Shape
    dtype: np.dtype
    unit: Shape
    blocks: list[tuple[zarr.Index, np.ndarray]]


@runtime_checkable
class Barrier(Protocol):
    """Where the processes of a run wait for each other."""

    @property
    def index(self) -> int: ...

    def wait(self, name: str, timeout: float) -> None: ...


class Alone:
    """The barrier of a single process."""

    index = 0

    def wait(self, name: str, timeout: float) -> None:
        """Nothing."""


class Writer:
    """Saves checkpoints into a folder, one at a time in the background, and keeps the last `keep` of them.

    Of several processes each writes what it holds; the first one commits when all have written.
    """

    def __init__(self, folder: Path, keep: int, barrier: Barrier | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.barrier = barrier or Alone()
        self.last = max(steps(folder), default=None)
        """Step of the last complete checkpoint."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        logical: Mapping[str, Shape],
        meta: dict[str, Any],
        rows: Mapping[str, Rows] | None = None,
    ) -> None:
        """Copies the arrays off the devices, then returns: they may be donated. The disk is written meanwhile.

        `logical[name]` is the shape without padding of an array that has some; `rows[name]` says, of an array whose
        rows are not stored in their order, where each is stored (below 0: not at all). Waits for the save before it,
        and raises its UserError.
        """
        self.wait()
        held = _off_the_devices(arrays, logical, rows or {})
        self._pending = self._thread.submit(self._write, step, held, meta)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises UserError where the last save failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, held: dict[str, _Held], meta: dict[str, Any]) -> None:
        final = path(self.folder, step)
        partial = final.with_suffix(".partial")
        try:
            for name, array in held.items():
                zarr.write(partial / "arrays" / name, array.shape, array.dtype, array.unit, array.blocks)
            self.barrier.wait("checkpoint written", SAVING)
            if self.barrier.index == 0:
                _write_manifest(partial, step, held, meta)
                _commit(partial, final)
            self.barrier.wait("checkpoint committed", SAVING)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"{final}: the checkpoint could not be written ({error}); earlier ones are untouched; "
                "make room or mend the disk, then give the same command to go on from the last one"
            ) from None
        self.last = step
        if self.barrier.index == 0:
            prune(self.folder, self.keep)


def path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def prune(folder: Path, keep: int) -> None:
    """Removes all but the last `keep` checkpoints."""
    for step in steps(folder)[:-keep]:
        # Renamed first: a checkpoint half removed must not look like a complete one.
        doomed = path(folder, step).with_suffix(".partial")
        path(folder, step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clear_partial(folder: Path) -> list[Path]:
    """Removes what saves that were cut off have left, and nothing else. Nobody may be saving into the folder."""
    removed = []
    for entry in sorted(folder.glob("step-*.partial")):
        ours = re.fullmatch(r"step-\d{8,}\.partial", entry.name) and entry.is_dir() and not entry.is_symlink()
        if ours and all(part.name in PARTS for part in entry.iterdir()):
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


def read_manifest(folder: Path, step: int) -> Manifest:
    """What the checkpoint of a step says of itself, its checksums proved. Raises DamagedCheckpoint, UserError."""
    where = path(folder, step)
    try:
        sums = (where / "SHA256SUMS").read_bytes().splitlines(keepends=True)
        good = sums[:1] == [_sum_line(where, "manifest.json")]
        text = (where / "manifest.json").read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{error.filename}: {error.strerror}") from None
    if not good:
        raise DamagedCheckpoint(f"{where / 'manifest.json'}: differs from its checksum in SHA256SUMS")
    fields = json.loads(text)
    if fields["format"] != FORMAT:
        raise UserError(
            f"{where}: format {fields['format']}, but this jaxgpt reads {FORMAT}; use the one that wrote it"
        )
    arrays = {name: (tuple(a["shape"]), np.dtype(a["dtype"])) for name, a in fields["arrays"].items()}
    if len(sums) != len(arrays) + 1:
        raise DamagedCheckpoint(f"{where / 'SHA256SUMS'}: is not the list of this checkpoint's files")
    for line, name in zip(sums[1:], arrays, strict=True):
        _check_sum(where, f"arrays/{name}/zarr.json", name, line)
    return Manifest(fields["step"], arrays, fields["meta"])


def restore(
    folder: Path,
    step: int,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    logical: Mapping[str, Shape] | None = None,
    rows: Mapping[str, Rows] | None = None,
) -> dict[str, jax.Array]:
    """The arrays that `targets` names, in its shapes (with padding, which is zero), types and shardings.

    Each device's part is read by itself, so that no whole array need fit the host. Where `logical` is given, stored
    shapes must be its shapes, or the targets' own; `rows` as for Writer.save. Raises DamagedCheckpoint naming array
    and file, and UserError where the checkpoint holds other arrays than these.
    """
    manifest = read_manifest(folder, step)
    where = path(folder, step)
    restored = {}
    for name, target in targets.items():
        wanted = None if logical is None else logical.get(name, target.shape)
        stored = _stored(where, manifest, name, target, wanted)
        restored[name] = _restore_array(where / "arrays" / name, name, stored, target, (rows or {}).get(name))
    return restored


def _stored(where: Path, manifest: Manifest, name: str, target: jax.ShapeDtypeStruct, wanted: Shape | None) -> Shape:
    """The shape in which an array is stored. Raises UserError where the target is another array."""
    if name not in manifest.arrays:
        raise UserError(f"{where}: holds no array {name}; it was saved from another model")
    shape, dtype = manifest.arrays[name]
    fits = len(shape) == len(target.shape) and all(a <= b for a, b in zip(shape, target.shape, strict=True))
    if dtype != target.dtype or not fits or wanted not in (None, shape):
        asked = f"{target.dtype}{list(wanted or target.shape)}"
        raise UserError(f"{where}: array {name} is {dtype}{list(shape)}, but the model has {asked}")
    return shape


def _restore_array(where: Path, name: str, stored: Shape, target: jax.ShapeDtypeStruct, rows: Rows | None) -> jax.Array:
    def numbered(index: zarr.Index | None) -> zarr.Index:
        return zarr.resolve(index or (), target.shape)

    placed = target.sharding.addressable_devices_indices_map(target.shape)
    # Replicas are read once.
    parts = {str(index): index for index in map(numbered, placed.values())}
    try:
        values = _read(where, stored, np.dtype(target.dtype), list(parts.values()), rows)
    except zarr.Unreadable as error:
        raise DamagedCheckpoint(f"{error.file}: array {name} is damaged ({error.reason})") from None
    except PermissionError as error:
        raise UserError(f"{where}: array {name} cannot be read ({error})") from None
    read = dict(zip(parts, values, strict=True))
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: read[str(numbered(index))])


def _read(where: Path, stored: Shape, dtype: np.dtype, parts: list[zarr.Index], rows: Rows | None) -> list[np.ndarray]:
    """Those parts of a stored array; where rows are stored in another order, row by row."""
    if rows is None:
        return zarr.read(where, stored, dtype, parts)
    # a row that is not stored is read from beyond the array's end: zeros
    places = [[rows[r] if rows[r] >= 0 else stored[0] for r in range(part[0].start, part[0].stop)] for part in parts]
    single = [(slice(p, p + 1), *part[1:]) for part, held in zip(parts, places, strict=True) for p in held]
    values = iter(zarr.read(where, stored, dtype, single))
    return [np.concatenate([next(values) for _ in held]) for held in places]


def _off_the_devices(
    arrays: Mapping[str, jax.Array], logical: Mapping[str, Shape], rows: Mapping[str, Rows]
) -> dict[str, _Held]:
    mine = {name: [s for s in a.addressable_shards if s.replica_id == 0] for name, a in arrays.items()}
    for shards in mine.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    held = {}
    for name, array in arrays.items():
        # A copy: on CPU numpy would see the device's own buffer, which the next step overwrites.
        blocks = [(zarr.resolve(s.index, array.shape), np.array(s.data, copy=True)) for s in mine[name]]
        # Chunks that no two processes share: the whole array where one process holds it all.
        alone = array.is_fully_addressable
        unit = array.shape if alone else array.sharding.shard_shape(array.shape)
        if name in rows:
            unit = (1, *unit[1:])
            blocks = [one for index, values in blocks for one in _by_rows(index, values, rows[name])]
        held[name] = _Held(logical.get(name, array.shape), np.dtype(array.dtype), unit, blocks)
    return held


def _by_rows(index: zarr.Index, values: np.ndarray, rows: Rows) -> list[tuple[zarr.Index, np.ndarray]]:
    """A block as one for each of its rows that is stored, where it is stored."""
    places = [(at, rows[index[0].start + at]) for at in range(len(values))]
    return [((slice(p, p + 1), *index[1:]), values[at : at + 1]) for at, p in places if p >= 0]


def _write_manifest(partial: Path, step: int, held: dict[str, _Held], meta: dict[str, Any]) -> None:
    arrays = {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in held.items()}
    text = json.dumps({"format": FORMAT, "step": step, "meta": meta, "arrays": arrays}, indent=1)
    _write_synced(partial / "manifest.json", text.encode())
    names = ["manifest.json"] + [f"arrays/{name}/zarr.json" for name in held]
    _write_synced(partial / "SHA256SUMS", b"".join(_sum_line(partial, name) for name in names))


def _sum_line(where: Path, file: str) -> bytes:
    return f"{hashlib.sha256((where / file).read_bytes()).hexdigest()}  {file}\n".encode()


def _check_sum(where: Path, file: str, array: str, line: bytes) -> None:
    try:
        good = line == _sum_line(where, file)
    except OSError as error:
        raise DamagedCheckpoint(f"{where / file}: array {array} is damaged ({error.strerror})") from None
    if not good:
        raise DamagedCheckpoint(f"{where / file}: array {array} differs from its checksum in SHA256SUMS")


def _commit(partial: Path, final: Path) -> None:
    """Makes a written folder the checkpoint, all of it or nothing, even if the power fails."""
    for parent, _, _ in os.walk(partial):
        _sync_folder(Path(parent))
    partial.rename(final)
    _sync_folder(final.parent)


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
