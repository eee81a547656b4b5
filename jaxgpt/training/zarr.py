"""Arrays on disk: zarr3 with a checksum on every chunk, cut so that any mesh reads little more than it needs.

One file (an outer chunk) holds many inner chunks, each with its crc32c, and an index with a crc32c of its own. So a
flipped byte is found wherever it lies, a small model makes few files, and a large one no huge ones.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorstore as ts

Index = tuple[slice, ...]

FILE_BYTES = 2**27
"""Most bytes in one file."""
CHUNK_BYTES = 2**20
"""Most bytes in one inner chunk: the least that is read at once."""


class Unreadable(ValueError):
    """Stored data that is damaged or missing. `file` names it where the reader knows."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


class Unwritable(OSError):
    """Data that could not be stored, and why."""


def chunk_shape(shape: Sequence[int], itemsize: int, limit: int) -> tuple[int, ...]:
    """The largest chunk of at most `limit` bytes that divides `shape` evenly.

    The dimension with the fewest pieces is cut first, since a reading mesh may split any of them.
    """
    size, pieces = list(shape), [1] * len(shape)
    while math.prod(size) * itemsize > limit:
        d = min((d for d in range(len(size)) if size[d] > 1), key=lambda d: (pieces[d], -size[d]))
        factor = _smallest_factor(size[d])
        size[d] //= factor
        pieces[d] *= factor
    return tuple(size)


def write(
    path: Path, shape: Sequence[int], dtype: np.dtype, unit: Sequence[int], blocks: Sequence[tuple[Index, np.ndarray]]
) -> None:
    """Stores an array of `shape`, given as blocks; what lies outside of `shape` (padding) is left out.

    `unit` is a shape that no two writers share and that chunks must divide: the whole (padded) array where one
    process holds it, else a shard. Every byte is on the disk when this returns. Raises Unwritable.
    """
    outer = chunk_shape(unit, dtype.itemsize, FILE_BYTES)
    spec = _spec(path) | {"metadata": _metadata(shape, dtype, outer), "store_data_equal_to_fill_value": True}
    try:
        store = ts.open(spec, create=True, open=True).result()  # another process may have been first
        # One transaction, so that a chunk that several shards share is written once.
        transaction = ts.Transaction()
        writes = []
        for index, values in blocks:
            clipped = clip(index, shape)
            if not is_empty(clipped):
                target = store.with_transaction(transaction)[clipped]
                part = values[tuple(slice(0, s.stop - s.start) for s in clipped)]
                writes.append(target.write(part, can_reference_source_data_indefinitely=True))
        for one in writes:
            one.copy.result()
        transaction.commit_async().result()
    except (OSError, ValueError) as error:
        raise Unwritable(_reason(error)) from None


def read(path: Path, shape: Sequence[int], dtype: np.dtype, indices: Sequence[Index]) -> list[np.ndarray]:
    """The parts `indices` of a stored array of `shape`; what they have beyond `shape` is filled with zeros.

    Reads the chunks that the parts touch, all parts at once. Raises Unreadable.
    """
    try:
        store = ts.open(_spec(path), open=True).result()
        if store.shape != tuple(shape) or store.dtype.numpy_dtype != dtype:
            raise Unreadable(path / "zarr.json", f"is {store.dtype.name}{list(store.shape)}, not {dtype}{list(shape)}")
        clipped = [clip(index, shape) for index in indices]
        reads = [None if is_empty(part) else store[part].read() for part in clipped]
        return [
            _filled(index, dtype, None if one is None else one.result())
            for index, one in zip(indices, reads, strict=True)
        ]
    except (Unreadable, PermissionError):
        raise
    except (OSError, ValueError, IndexError) as error:
        named = re.search(r'local file "([^"]+)"', str(error))
        raise Unreadable(Path(named[1]) if named else path, _reason(error)) from None


def resolve(index: Index, shape: Sequence[int]) -> Index:
    """The index with every start and stop as a number."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def clip(index: Index, shape: Sequence[int]) -> Index:
    """The part of a resolved index that lies in `shape`."""
    return tuple(slice(s.start, max(s.start, min(s.stop, n))) for s, n in zip(index, shape, strict=True))


def is_empty(index: Index) -> bool:
    """Whether a resolved index holds no element."""
    return any(s.stop <= s.start for s in index)


def _filled(index: Index, dtype: np.dtype, values: np.ndarray | None) -> np.ndarray:
    shape = tuple(s.stop - s.start for s in index)
    if values is not None and values.shape == shape:
        return values
    block = np.zeros(shape, dtype)
    if values is not None:
        block[tuple(slice(0, n) for n in values.shape)] = values
    return block


def _spec(path: Path) -> dict[str, object]:
    # A missing chunk would otherwise read as zeros.
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "fill_missing_data_reads": False,
    }


def _metadata(shape: Sequence[int], dtype: np.dtype, outer: tuple[int, ...]) -> dict[str, object]:
    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    inner = chunk_shape(outer, dtype.itemsize, CHUNK_BYTES)
    sharded = {"chunk_shape": inner, "codecs": checked, "index_codecs": checked, "index_location": "end"}
    return {
        "shape": list(shape),
        "data_type": ts.dtype(dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharded}],
    }


def _smallest_factor(n: int) -> int:
    return next((f for f in range(2, math.isqrt(n) + 1) if n % f == 0), n)


def _reason(error: Exception) -> str:
    """What went wrong, without the operations around it and the specification that tensorstore adds."""
    return str(error).partition(" [tensorstore_spec")[0].rpartition(": ")[2]
