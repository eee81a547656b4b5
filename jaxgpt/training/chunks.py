"""Which files and chunks of a stored array a part of it touches, and the checksums that lie in these files.

A chunk's own crc32c proves what is in it, not that it is the chunk of its place: a file in the place of another, or
one of an older checkpoint, has checksums that are right. So all of them are listed as they are written, and compared as
they are read. A file is what zarr3 calls a shard: chunks of raw bytes, each with its crc32c behind it, and at the end
an index of (offset, size), each 8 bytes, with a crc32c of its own.
"""

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]
DIGITS = 8
"""Of a checksum in a list."""
ABSENT = "-" * DIGITS
"""Of a chunk that lies beyond the array, in a file that lies there in part: its offset and size are 2^64 - 1."""


@dataclass(frozen=True)
class Grid:
    """How an array is cut: into files, and each of them into chunks."""

    file: Shape
    """Shape of a file's part."""
    chunk: Shape
    """Shape of a chunk; divides the file's."""

    @property
    def count(self) -> int:
        """Chunks in a file."""
        return math.prod(self._chunks)

    @property
    def _chunks(self) -> Shape:
        return tuple(f // c for f, c in zip(self.file, self.chunk, strict=True))

    def touched(self, part: Index) -> Iterator[tuple[str, list[int]]]:
        """Each file that a part with something in it lies in, by its name, and the numbers of the chunks there."""
        spans = [range(s.start // f, -(-s.stop // f)) for s, f in zip(part, self.file, strict=True)]
        for at in itertools.product(*spans):
            within = [
                range(max(s.start - a * f, 0) // c, -(-min(s.stop - a * f, f) // c))
                for s, a, f, c in zip(part, at, self.file, self.chunk, strict=True)
            ]
            yield "/".join(("c", *map(str, at))), [self._number(chunk) for chunk in itertools.product(*within)]

    def files(self, shape: Shape) -> Iterator[tuple[str, Index]]:
        """Each file of a whole array, by its name, and its part of the array."""
        starts = [range(0, n, f) for n, f in zip(shape, self.file, strict=True)]
        for at in itertools.product(*starts):
            name = "/".join(("c", *(str(a // f) for a, f in zip(at, self.file, strict=True))))
            yield name, tuple(slice(a, min(a + f, n)) for a, f, n in zip(at, self.file, shape, strict=True))

    def _number(self, chunk: Iterable[int]) -> int:
        number = 0
        for at, size in zip(chunk, self._chunks, strict=True):
            number = number * size + at
        return number


def checksums(file: Path, count: int, numbers: Iterable[int]) -> list[str]:
    """The checksums in a file of `count` chunks of those with these numbers, as hexadecimal digits.

    Raises OSError where it cannot be read, and ValueError where it is no such file.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        end = os.fstat(descriptor).st_size - 4
        index = np.frombuffer(os.pread(descriptor, 16 * count, max(0, end - 16 * count)), "<u8").reshape(count, 2)
        held = index[:, 0] != 2**64 - 1
        ends = np.where(held, index.sum(axis=1), 4)
        if not np.all((ends >= 4) & (ends <= max(0, end))):
            raise ValueError("its index of chunks points beyond it")
        return [os.pread(descriptor, 4, int(ends[n]) - 4).hex() if held[n] else ABSENT for n in numbers]
    finally:
        os.close(descriptor)


def slabs(shape: Shape, itemsize: int, limit: int) -> Iterator[Index]:
    """Parts of an array that follow one another in memory, each of at most `limit` bytes, or one element."""

    def below(d: int) -> int:
        return math.prod(shape[d:]) * itemsize

    cut = next((d for d in range(len(shape)) if below(d + 1) <= limit), None)
    if cut is None or below(0) <= limit:
        yield tuple(slice(0, n) for n in shape)
        return
    rows = max(1, limit // below(cut + 1))
    for at in itertools.product(*map(range, shape[:cut])):
        for first in range(0, shape[cut], rows):
            piece = slice(first, min(first + rows, shape[cut]))
            yield (*(slice(a, a + 1) for a in at), piece, *(slice(0, n) for n in shape[cut + 1 :]))
