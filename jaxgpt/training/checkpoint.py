"""Checkpoints: split arrays saved in the background, committed by one rename, and opened on any mesh.

What a checkpoint's folder holds is said in manifest.py. Of several processes each writes its own parts into one folder
that all of them see; when all have, process 0 alone commits it.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.processes.together import EVERYONE
from jaxgpt.training import manifest, retention, zarr
from jaxgpt.training.chunks import Index
from jaxgpt.training.group import PATIENCE, Group
from jaxgpt.training.manifest import DamagedCheckpoint, Manifest, Shape, path, steps
from jaxgpt.training.manifest import read as read_manifest
from jaxgpt.training.retention import clear_partial, set_aside

__all__ = ["DamagedCheckpoint", "Manifest", "Shape", "Writer", "clear_partial", "path", "read_manifest", "restore"]
__all__ += ["set_aside", "steps"]

Rows = tuple[int, ...]
AT_ONCE = 4
"""Arrays written at once: while one waits for the disk, another is put together."""


@dataclass(frozen=True)
class _Held:
    """One array off the devices: the parts that this process writes."""

    shape: Shape
    dtype: np.dtype
    unit: Shape
    blocks: list[tuple[Index, np.ndarray]]


class Writer:
    """Saves checkpoints into a folder, one at a time in the background. The last `keep` of them stay, those of every
    `every`-th step (0: none for that), and the best."""

    def __init__(self, folder: Path, keep: int, every: int = 0, group: Group = EVERYONE) -> None:
        """`group`: the processes that save together, each with a Writer of its own on the same folder."""
        self.folder, self.keep, self.every = folder, keep, every
        self.last = max(steps(folder), default=None)
        """Step of the last complete checkpoint."""
        self._group = group
        self._losses = retention.losses_in(folder) if group.index == 0 else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written: a save would wait for it."""
        return self._pending is not None and not self._pending.done()

    def save(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        logical: Mapping[str, Shape],
        meta: dict[str, Any],
        rows: Mapping[str, Rows] | None = None,
        loss: float | None = None,
    ) -> None:
        """Copies the arrays off the devices, then returns: they may be donated. The disk is written meanwhile.

        `logical[name]` is the shape without padding of an array that has some; `rows[name]` says, of an array whose
        rows are not stored in their order, where each is stored (below 0: not at all). `loss`: of the validation at
        this step. Waits for the save before it, and raises its UserError.
        """
        self.wait()
        held = _off_the_devices(arrays, logical, rows or {})
        said = Manifest(step, loss, {name: (one.shape, one.dtype) for name, one in held.items()}, meta)
        self._pending = self._thread.submit(self._write, said, held)

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

    def _write(self, said: Manifest, held: dict[str, _Held]) -> None:
        final = path(self.folder, said.step)
        partial = final.with_suffix(".partial")
        first, begun = self._group.index == 0, False
        try:
            self._together("checkpoint begun", lambda: partial.mkdir(parents=True) if first else None)
            begun = True
            self._together("checkpoint written", lambda: self._write_arrays(partial, held))
            self._together("checkpoint committed", lambda: self._commit(partial, final, said) if first else None)
        except OSError as error:
            # Nobody writes into it any more, unless one was not heard of. What was there before is somebody else's.
            if first and begun:
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"{final}: the checkpoint could not be written ({error}); earlier ones are untouched; "
                "make room or mend the disk, then give the same command to go on from the last one"
            ) from None
        self.last = said.step
        if first:
            self._prune(said)

    def _together(self, name: str, work: Callable[[], None]) -> None:
        """Does this process's share, and returns when all have done theirs. Raises OSError where one of them could not,
        or was not heard of."""
        failed = "ended by an error of its own"
        try:
            work()
            failed = ""
        except OSError as error:
            failed = str(error) or type(error).__name__
        finally:
            told = self._group.exchange(name, failed, PATIENCE)
        met = [
            text if self._group.count == 1 else f"process {index}: {text}" for index, text in enumerate(told) if text
        ]
        if met:
            raise OSError("; ".join(met))

    def _write_arrays(self, partial: Path, held: dict[str, _Held]) -> None:
        def write(name: str) -> zarr.Sums:
            one = held[name]
            where = partial / "arrays" / name
            return zarr.write(where, one.shape, one.dtype, one.unit, one.blocks, create=self._group.index == 0)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            sums = dict(zip(held, threads.map(write, held), strict=True))
        manifest.write_sums(partial, self._group.index, sums)
        _sync_folders(partial)

    def _commit(self, partial: Path, final: Path, said: Manifest) -> None:
        """Makes a written folder the checkpoint, all of it or nothing, even if the power fails."""
        manifest.write(partial, said, self._group.count)
        _sync_folder(partial)
        partial.rename(final)
        _sync_folder(final.parent)

    def _prune(self, said: Manifest) -> None:
        self._losses = {step: self._losses.get(step) for step in steps(self.folder)} | {said.step: said.loss}
        try:
            retention.prune(self.folder, self._losses, self.keep, self.every)
        except OSError as error:
            raise UserError(
                f"{error.filename}: an earlier checkpoint cannot be removed ({error.strerror}); "
                "mend that, then give the same command to go on from the last one"
            ) from None


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
    said = read_manifest(folder, step)
    where, sums = path(folder, step), manifest.read_sums(folder, step)
    restored = {}
    for name, target in targets.items():
        wanted = None if logical is None else logical.get(name, target.shape)
        stored = _Stored(where / "arrays" / name, _shape(where, said, name, target, wanted), sums.get(name, {}))
        restored[name] = _restore_array(stored, name, target, (rows or {}).get(name))
    return restored


@dataclass(frozen=True)
class _Stored:
    """One array in a checkpoint."""

    where: Path
    shape: Shape
    sums: zarr.Sums


def _shape(where: Path, said: Manifest, name: str, target: jax.ShapeDtypeStruct, wanted: Shape | None) -> Shape:
    """The shape in which an array is stored. Raises UserError where the target is another array."""
    if name not in said.arrays:
        raise UserError(f"{where}: holds no array {name}; it was saved from another model")
    shape, dtype = said.arrays[name]
    fits = len(shape) == len(target.shape) and all(a <= b for a, b in zip(shape, target.shape, strict=True))
    if dtype != target.dtype or not fits or wanted not in (None, shape):
        asked = f"{target.dtype}{list(wanted or target.shape)}"
        raise UserError(f"{where}: array {name} is {dtype}{list(shape)}, but the model has {asked}")
    return shape


def _restore_array(stored: _Stored, name: str, target: jax.ShapeDtypeStruct, rows: Rows | None) -> jax.Array:
    def numbered(index: Index | None) -> Index:
        return zarr.resolve(index or (), target.shape)

    placed = target.sharding.addressable_devices_indices_map(target.shape)
    # Replicas are read once.
    parts = {str(index): index for index in map(numbered, placed.values())}
    try:
        values = _read(stored, np.dtype(target.dtype), list(parts.values()), rows)
    except zarr.Unreadable as error:
        raise DamagedCheckpoint(f"{error.file}: array {name} is damaged ({error.reason})") from None
    except PermissionError as error:
        raise UserError(f"{stored.where}: array {name} cannot be read ({error})") from None
    read = dict(zip(parts, values, strict=True))
    return jax.make_array_from_callback(
        target.shape, target.sharding, lambda index: read[str(numbered(index))], dtype=target.dtype
    )


def _read(stored: _Stored, dtype: np.dtype, parts: list[Index], rows: Rows | None) -> list[np.ndarray]:
    """Those parts of a stored array; where rows are stored in another order, by runs that follow one another."""
    if rows is None:
        return zarr.read(stored.where, stored.shape, dtype, parts, stored.sums)
    runs = [_runs(rows[part[0].start : part[0].stop], stored.shape[0]) for part in parts]
    pieces = [(run, *part[1:]) for part, some in zip(parts, runs, strict=True) for run in some]
    values = iter(zarr.read(stored.where, stored.shape, dtype, pieces, stored.sums))
    return [np.concatenate([next(values) for _ in some]) for some in runs]


def _runs(places: Rows, beyond: int) -> list[slice]:
    """Places as slices; what is stored nowhere lies beyond the array's end, where zeros are read."""
    runs: list[slice] = []
    for place in places:
        if place >= 0 and runs and runs[-1].stop == place:
            runs[-1] = slice(runs[-1].start, place + 1)
        else:
            first = place if place >= 0 else beyond
            runs.append(slice(first, first + 1))
    return runs


def _off_the_devices(
    arrays: Mapping[str, jax.Array], logical: Mapping[str, Shape], rows: Mapping[str, Rows]
) -> dict[str, _Held]:
    mine = {name: [s for s in a.addressable_shards if s.replica_id == 0] for name, a in arrays.items()}
    for shards in mine.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    held = {}
    for name, array in arrays.items():
        blocks = [(zarr.resolve(s.index, array.shape), _on_the_host(s.data)) for s in mine[name]]
        # Chunks that no two processes share: the whole array where one process holds it all.
        devices: Iterable[Any] = array.sharding.device_set
        alone = len({device.process_index for device in devices}) == 1
        unit = array.shape if alone else array.sharding.shard_shape(array.shape)
        if name in rows:
            unit = (1, *unit[1:])
            blocks = [one for index, values in blocks for one in _by_rows(index, values, rows[name])]
        held[name] = _Held(logical.get(name, array.shape), np.dtype(array.dtype), unit, blocks)
    return held


def _on_the_host(data: jax.Array) -> np.ndarray:
    """A copy of one device's part. Where devices share the host's memory, numpy would see their own buffer, which the
    next step overwrites."""
    shares = any(d.platform == "cpu" for d in data.devices()) or data.sharding.memory_kind != "device"
    return np.array(data, copy=True) if shares else np.asarray(data)


def _by_rows(index: Index, values: np.ndarray, rows: Rows) -> list[tuple[Index, np.ndarray]]:
    """A block as one for each of its rows that is stored, where it is stored."""
    places = [(at, rows[index[0].start + at]) for at in range(len(values))]
    return [((slice(p, p + 1), *index[1:]), values[at : at + 1]) for at, p in places if p >= 0]


def _sync_folders(partial: Path) -> None:
    for parent, _, _ in os.walk(partial):
        _sync_folder(Path(parent))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
