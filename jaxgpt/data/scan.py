"""What a file of data holds: read once, in parts that any process can take, for its documents, size and digest."""

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from jaxgpt.data import formats
from jaxgpt.data.files import shown, unreadable
from jaxgpt.data.formats import Form
from jaxgpt.errors import UserError

PIECE = 2**21
"""Bytes of a file that are read as one task, where it can be divided; more of a file of more than _MOST times that."""
_MOST = 4096
_SNIFFED = 8192
"""Bytes at a file's start in which a zero byte tells a binary file."""
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Piece:
    """A part of a file that can be read by itself."""

    start: int
    """Byte of a text or JSONL file, uncompressed; row group of a Parquet file."""
    stop: int | None
    """The one after the last; None: to the end."""
    documents: int
    """That are not empty. A text file is one."""
    size: int
    """UTF-8 bytes of their text."""


@dataclass(frozen=True)
class File:
    """One file that has text."""

    name: str
    """Path below the folder it was found in, with slashes: the same on every machine."""
    path: str
    form: Form
    pieces: tuple[Piece, ...]
    digest: str
    """BLAKE2b of its texts, 16 bytes as hexadecimal digits."""
    stored: int
    """Bytes on disk."""
    modified: int
    """Time of its last change, nanoseconds."""

    @property
    def size(self) -> int:
        """UTF-8 bytes of its text."""
        return sum(piece.size for piece in self.pieces)

    @property
    def documents(self) -> int:
        return sum(piece.documents for piece in self.pieces)


@dataclass(frozen=True)
class Task:
    """A part of a file, to be read by any process."""

    name: str
    path: str
    form: Form
    start: int
    stop: int | None
    strict: bool


@dataclass(frozen=True)
class Scanned:
    """What a part was found to hold."""

    piece: Piece
    digest: bytes


# What files hold


def tasks(name: str, path: str, form: Form, strict: bool) -> list[Task]:
    """A file in parts of about PIECE bytes, where it can be divided. strict: what is not UTF-8 is refused."""
    stops: list[int | None] = [None]
    try:
        if form.kind == "jsonl" and not form.compression:
            size = os.stat(path).st_size
            each = max(PIECE, size // _MOST)
            stops = [formats.line_start(path, at, size) for at in range(each, size, each)]
            stops = [*sorted({stop for stop in stops if stop is not None and 0 < stop < size}), None]
        elif form.kind == "parquet" and not form.compression:
            stops = [*range(1, formats.Table(path, form).groups), None]
    except OSError as error:
        raise unreadable(path, error) from None
    starts = [0, *(stop for stop in stops if stop is not None)]
    return [Task(name, path, form, start, stop, strict) for start, stop in zip(starts, stops, strict=True)]


def scan(task: Task) -> Scanned | None:
    """What a task's part of a file holds. Where a text is not UTF-8: UserError if strict, else None."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        if task.form.kind == "text":
            return _scan_text(task)
        count = size = 0
        for text in texts(task.path, task.form, task.start, task.stop):
            content = text.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
            count, size = count + 1, size + len(content)
    except OSError as error:
        raise unreadable(task.path, error) from None
    return Scanned(Piece(task.start, task.stop, count, size), digest.digest())


def _scan_text(task: Task) -> Scanned | None:
    digest = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = offset = 0
    try:
        for block in formats.blocks(task.path, task.form, 0, None):
            digest.update(block)
            offset = size - len(decoder.getstate()[0])
            decoder.decode(block)
            size += len(block)
        offset = size - len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if not task.strict:
            return None
        raise UserError(
            f"{shown(task.path)}: not UTF-8 at byte {offset + error.start} ({error.reason}); convert the file to "
            "UTF-8, or take a pattern that leaves it out"
        ) from None
    return Scanned(Piece(0, size, 1, size), digest.digest())


def joined_file(task: Task, parts: list[Scanned]) -> File:
    """A file from all of its parts."""
    joined = b"".join(part.digest for part in parts)
    digest = joined if len(parts) == 1 else hashlib.blake2b(joined, digest_size=16).digest()
    status = os.stat(task.path)
    pieces = tuple(part.piece for part in parts if part.piece.size)
    return File(task.name, task.path, task.form, pieces, digest.hex(), status.st_size, status.st_mtime_ns)


def texts(path: str, form: Form, start: int, stop: int | None) -> Iterator[str]:
    """The texts of a part of a JSONL or Parquet file that are not empty."""
    if form.kind == "jsonl":
        found = formats.lines(path, form, start, stop)
    else:
        table = formats.Table(path, form)
        found = table.rows(start, table.groups if stop is None else stop)
    return (text for text in found if text)


def is_binary(path: str, form: Form) -> bool:
    """Whether a file has a zero byte near its start, decompressed, and is not UTF-16."""
    try:
        start = next(formats.blocks(path, form, 0, _SNIFFED), b"")
    except OSError as error:
        raise unreadable(path, error) from None
    return b"\0" in start and not start.startswith(_UTF16_MARKS)
