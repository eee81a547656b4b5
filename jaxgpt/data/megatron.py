"""Megatron's indexed data sets, .bin and .idx, read without a copy and written byte for byte.

    .idx  9 bytes MMIDIDX\\0\\0, u64 version 1, u8 type of a token, u64 S sequences, u64 D document indices,
          S x i32 tokens of each sequence, S x i64 its byte offset in .bin, D x i64 first sequence of each document
          (the first is 0, the last S), and of multimodal files S x i8 modes
    .bin  the tokens, back to back

All little-endian, without padding; a token is u16 below 65500 entries of the vocabulary, else i32. The layout is that
of Megatron-LM's core/datasets/indexed_dataset.py. The token stores of jaxgpt are such pairs too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Int64

from jaxgpt.errors import UserError

MAGIC = b"MMIDIDX\0\0"
HEADER = 34
"""Bytes before the first array."""
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in TYPES.items()}
_SMALL = 65_500
_CHUNK = 2**16
"""Entries of the index that are looked at, or written, at once."""
_CHECKED = 64
"""Most chunks of the index checked on opening; of a larger one as many, evenly spread."""

Chunks = Callable[[], Iterator[np.ndarray]]


def kind_for(vocab: int) -> np.dtype[Any]:
    """The type that Megatron stores tokens of a vocabulary in."""
    return np.dtype("<u2" if vocab < _SMALL else "<i4")


def pair(path: str | Path) -> tuple[Path, Path]:
    """The .bin and .idx that a path names: either of them, or what comes before the suffix."""
    text = str(path)
    prefix = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(prefix + ".bin"), Path(prefix + ".idx")


class Documents:
    """Where documents begin in a run of tokens, read as asked for: nothing is held in memory."""

    def __init__(self, count: int, start: Callable[[np.ndarray], np.ndarray]) -> None:
        """start: the first token of each of these documents; never falling."""
        self.count, self.start = count, start

    def until(self, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Documents that begin at or before each place."""
        low, high = np.zeros(len(places), np.int64), np.full(len(places), self.count, np.int64)
        for _ in range(self.count.bit_length()):
            # where low has met high, the middle may be one too far, and is not asked for
            middle = np.minimum((low + high) // 2, self.count - 1)
            later = self.start(middle) > places
            searching = low < high
            high = np.where(searching & later, middle, high)
            low = np.where(searching & ~later, middle + 1, low)
        return low

    def between(self, first: Int64[np.ndarray, " n"], last: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """(row, place) of each document that begins after first[row] and at or before last[row]."""
        if not self.count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        low, high = self.until(first), self.until(last)
        counts = high - low
        rows = np.repeat(np.arange(len(first)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self.start(low[rows] + within)


@dataclass(frozen=True, eq=False)
class Indexed:
    """A pair of files, opened. All arrays are memory-mapped."""

    path: Path
    """The .bin."""
    tokens: np.ndarray
    lengths: np.ndarray
    """Tokens of each sequence."""
    pointers: np.ndarray
    """Byte offset of each sequence."""
    indices: np.ndarray
    """First sequence of each document, and the number of sequences."""

    @property
    def documents(self) -> Documents:
        """Where the documents begin, in tokens; empty ones at the end are left out, since nothing begins there."""
        count, size = len(self.indices) - 1, self.tokens.dtype.itemsize
        sequences = len(self.lengths)

        def start(which: np.ndarray) -> np.ndarray:
            first = self.indices[which]
            inside = np.minimum(first, max(sequences - 1, 0))
            return np.where(first < sequences, self.pointers[inside] // size, len(self.tokens))

        return Documents(count if sequences else 0, start)


def read(path: str | Path) -> Indexed:
    """Opens a pair by either file or their prefix. The index is checked against the tokens: whole where it is small.

    Raises UserError where a file is missing, truncated, not Megatron's, or not of the other one.
    """
    data, index = pair(path)
    for file, other in ((index, data), (data, index)):
        if not file.is_file():
            raise UserError(f"{file}: no such file; Megatron's tokens are a pair, and {other.name} is only half of it")
    kind, sequences, documents = _header(index)
    at = HEADER
    arrays = {}
    for name, of, count in (
        ("lengths", "<i4", sequences),
        ("pointers", "<i8", sequences),
        ("indices", "<i8", documents),
    ):
        arrays[name] = _mapped(index, of, at, count)
        at += np.dtype(of).itemsize * count
    size = data.stat().st_size
    if size % kind.itemsize:
        raise UserError(f"{data}: {size} bytes are no whole number of {kind.itemsize}-byte tokens; copy the pair again")
    found = Indexed(data, _mapped(data, kind.str, 0, size // kind.itemsize), **arrays)
    _check(index, found)
    return found


def _header(index: Path) -> tuple[np.dtype[Any], int, int]:
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER)
    if not head.startswith(MAGIC):
        raise UserError(f"{index}: not an index of Megatron's (it begins with {head[:9]!r}, not {MAGIC!r})")
    if len(head) < HEADER:
        raise UserError(f"{index}: truncated, {size} bytes in place of {HEADER} at least; copy it again")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    if version != 1:
        raise UserError(f"{index}: version {version} of Megatron's index; only version 1 is known")
    kind = np.dtype(TYPES.get(code, "V1"))
    if kind.kind not in "iu":
        raise UserError(f"{index}: token type {code} holds no token ids; known are 1 to 5 and 8")
    wanted = HEADER + 12 * sequences + 8 * documents
    if size not in (wanted, wanted + sequences):
        said = f"{sequences} sequences and {documents} document indices take {wanted} bytes, and it has {size}"
        raise UserError(f"{index}: {'truncated' if size < wanted else 'too long'}: {said}; copy it again")
    if documents < 1:
        raise UserError(f"{index}: has no document indices, and Megatron's has one more than documents; write it again")
    return kind, sequences, documents


def _mapped(path: Path, kind: str, offset: int, count: int) -> np.ndarray:
    return np.memmap(path, kind, "r", offset, (count,)) if count else np.zeros(0, kind)


def _check(index: Path, found: Indexed) -> None:
    """Raises UserError where lengths, offsets and documents do not fit together, or not the tokens."""
    size, sequences = found.tokens.dtype.itemsize, len(found.lengths)
    end = int(found.pointers[-1]) + int(found.lengths[-1]) * size if sequences else 0
    if end != len(found.tokens) * size:
        raise UserError(
            f"{found.path}: has {len(found.tokens) * size} bytes, and {index.name} speaks of {end}; "
            "the two are not a pair, or one is truncated"
        )
    ends = int(found.indices[0]), int(found.indices[-1])
    if ends != (0, sequences):
        raise UserError(f"{index}: its documents go from sequence {ends[0]} to {ends[1]}, not from 0 to {sequences}")
    for at in _spread(sequences):
        lengths = found.lengths[at : at + _CHUNK].astype(np.int64)
        pointers = found.pointers[at : at + _CHUNK + 1]
        follows = pointers[0] + np.cumsum(lengths) * size
        first = at == 0 and pointers[0] != 0
        if first or (lengths < 0).any() or (follows[: len(pointers) - 1] != pointers[1:]).any():
            raise UserError(f"{index}: damaged, the sequences from {at} on do not lie back to back; write it again")
    for at in _spread(len(found.indices) - 1):
        indices = found.indices[at : at + _CHUNK + 1]
        if (np.diff(indices) < 0).any() or indices.min() < 0 or indices.max() > sequences:
            raise UserError(f"{index}: damaged, the documents from {at} on do not follow each other; write it again")


def _spread(count: int) -> list[int]:
    chunks = -(-count // _CHUNK)
    return [int(n) * _CHUNK for n in np.linspace(0, chunks - 1, min(chunks, _CHECKED), dtype=int)] if chunks else []


# Writing


def write(path: str | Path, documents: Iterable[np.ndarray], vocab: int) -> int:
    """Writes a pair, one sequence a document, as Megatron's own tools do; returns the number of tokens.

    path: either file or their prefix. documents: token ids below vocab. Raises UserError where a file is there already.
    """
    data, index = pair(path)
    kind, lengths = kind_for(vocab), []
    with _new(data) as file:
        for document in documents:
            file.write(np.asarray(document).astype(kind).tobytes())
            lengths.append(len(document))
    write_index(index, kind, len(lengths), lambda: iter([np.array(lengths, np.int64)]))
    return sum(lengths)


def write_index(index: Path, kind: np.dtype[Any], count: int, lengths: Chunks) -> None:
    """Writes the .idx of `count` documents; lengths: gives their tokens in chunks, as often as it is called.

    Raises UserError where it is there already, or a document is longer than the index can say.
    """
    with _new(index) as file:
        file.write(MAGIC + (1).to_bytes(8, "little") + bytes([CODES[kind]]))
        file.write(count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little"))
        for chunk in lengths():
            if chunk.size and chunk.max() >= 2**31:
                raise UserError(
                    f"{index}: a document of {chunk.max():,} tokens; the format ends at 2^31 - 1, divide it"
                )
            file.write(chunk.astype("<i4").tobytes())
        place = 0
        for chunk in lengths():
            ends = place + np.cumsum(chunk.astype(np.int64)) * kind.itemsize
            file.write((ends - chunk * kind.itemsize).astype("<i8").tobytes())
            place = int(ends[-1]) if len(ends) else place
        for at in range(0, count + 1, _CHUNK):
            file.write(np.arange(at, min(at + _CHUNK, count + 1), dtype="<i8").tobytes())


def _new(path: Path) -> IO[bytes]:
    try:
        return path.open("xb")
    except FileExistsError:
        raise UserError(f"{path}: is there already; give another name, or remove it") from None
