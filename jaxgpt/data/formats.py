"""What files of data are made of: text, JSONL and Parquet, each perhaps compressed, as streams and documents.

A file's name says what it is: .jsonl and .ndjson hold a JSON object a line, .parquet columns, all else text; .gz and
.zst behind any of these say how it is compressed.
"""

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from jaxgpt.errors import UserError

FIELD = "text"
"""The field of a JSONL object, or the column of a Parquet file, that is the text, unless another is named."""
Kind = Literal["text", "jsonl", "parquet"]
_SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".zst")
_BLOCK = 2**18


@dataclass(frozen=True)
class Form:
    """How to read a file."""

    kind: Kind
    compression: str = ""
    """"", ".gz" or ".zst"."""
    field: str = FIELD


def form_of(name: str, field: str) -> Form:
    """What a file is, by its name."""
    compression = next((suffix for suffix in _COMPRESSED if name.endswith(suffix)), "")
    plain = name.removesuffix(compression)
    kind: Kind = next((kind for suffix, kind in _SUFFIXES.items() if plain.endswith(suffix)), "text")
    return Form(kind, compression, field)


def library(name: str, path: str) -> ModuleType:
    """A package of the extra "data". Raises UserError, naming the file that asks for it, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{path}: reading it needs {package}; pip install 'jaxgpt[data]' brings it") from None


@contextmanager
def opened(path: str, form: Form) -> Iterator[io.BufferedIOBase]:
    """The file's bytes, decompressed. Raises UserError where what is compressed is damaged or cut off."""
    try:
        with open(path, "rb") as file:
            if form.compression == ".gz":
                with gzip.open(file) as inner:
                    yield inner
            elif form.compression == ".zst":
                yield io.BufferedReader(_Zstandard(file, path), _BLOCK)
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); fetch it again") from None


class _Zstandard(io.RawIOBase):
    """Decompresses frame after frame. The library's own reader takes a file that is cut off for a whole one."""

    def __init__(self, file: io.BufferedIOBase, path: str) -> None:
        self._library: Any = library("zstandard", path)
        self._file, self._path = file, path
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _fill(self) -> bool:
        """Decompresses the next block; False at the end."""
        self._input = self._input or self._file.read(_BLOCK)
        if not self._input:
            if self._frame is not None:
                raise UserError(f"{self._path}: not a whole zstd file (it is cut off); fetch it again")
            return False
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=2**31).decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._library.ZstdError as error:
            raise UserError(f"{self._path}: not a whole zstd file ({error}); fetch it again") from None
        self._input = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True


# Documents


def lines(path: str, form: Form, start: int, stop: int | None) -> Iterator[str]:
    """The texts of the JSONL objects on the lines that begin at bytes start .. stop (None: to the end), empty ones too.

    Raises UserError, with file and line, for a line that is no JSON object, has no such field, or no text in it.
    """
    with opened(path, form) as file:
        _skip(file, start)
        place = start
        for line in file:
            if stop is not None and place >= stop:
                return
            if line.strip():
                yield _text_of(path, form, line, place)
            place += len(line)


def line_start(path: str, place: int, size: int) -> int:
    """The first byte at or after `place` at which a line begins, in a file of `size` bytes that is not compressed."""
    if place <= 0:
        return 0
    with open(path, "rb") as file:
        file.seek(place - 1)
        file.readline()
        return min(file.tell(), size)


def _text_of(path: str, form: Form, line: bytes, place: int) -> str:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _bad(path, form, place, f"not UTF-8 at its byte {error.start} ({error.reason})") from None
    except (ValueError, RecursionError) as error:  # the latter of brackets in thousands
        raise _bad(path, form, place, f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _bad(path, form, place, "not a JSON object") from None
    if form.field not in found:
        names = ", ".join(list(found)[:8]) or "none"
        raise _bad(path, form, place, f'no field "{form.field}"; its fields are {names}; name one as PATH#FIELD')
    text = found[form.field]
    if not isinstance(text, str):
        raise _bad(path, form, place, f'field "{form.field}" is {json.dumps(text)[:40]}, not text')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _bad(path, form, place, f'field "{form.field}" has half of a surrogate pair at {error.start}') from None
    return text


def _bad(path: str, form: Form, place: int, what: str) -> UserError:
    """The lines before it are counted only now: a reader that begins in the middle does not know them."""
    number, passed = 1, 0
    with opened(path, form) as file:
        while passed < place:
            block = file.read(min(_BLOCK, place - passed))
            number += block.count(b"\n")
            passed += len(block)
    return UserError(f"{path}, line {number}: {what}")


class Table:
    """A Parquet file's column of text."""

    def __init__(self, path: str, form: Form) -> None:
        """Raises UserError where it is no Parquet file, or has no such column or no text in it."""
        self._library: Any = library("pyarrow", path)
        parquet: Any = library("pyarrow.parquet", path)
        self._path, self._field = path, form.field
        verified = {"page_checksum_verification": True}  # where the file has checksums
        try:
            if form.compression:
                with opened(path, form) as file:
                    self._file = parquet.ParquetFile(self._library.BufferReader(file.read()), **verified)
            else:
                self._file = parquet.ParquetFile(path, **verified)
        except self._library.ArrowInvalid as error:
            raise UserError(f"{path}: not a whole Parquet file ({error}); fetch it again") from None
        schema = self._file.schema_arrow
        if schema.names.count(form.field) != 1:
            names = ", ".join(schema.names[:8])
            raise UserError(f'{path}: no column "{form.field}"; its columns are {names}; name one as PATH#COLUMN')
        kind = schema.field(form.field).type
        if self._library.types.is_dictionary(kind):
            kind = kind.value_type
        if not (self._library.types.is_string(kind) or self._library.types.is_large_string(kind)):
            raise UserError(f'{path}: column "{form.field}" is of type {kind}, not text')

    @property
    def groups(self) -> int:
        """Row groups."""
        return self._file.num_row_groups

    def rows(self, start: int, stop: int) -> Iterator[str]:
        """The texts of row groups start .. stop, empty ones for what is null. Raises UserError where one is damaged."""
        for number in range(start, stop):
            try:
                column = self._file.read_row_group(number, columns=[self._field]).column(0)
                texts = column.to_pylist()
            except (self._library.ArrowInvalid, OSError) as error:
                raise UserError(f"{self._path}: row group {number} cannot be read ({error}); fetch it again") from None
            except UnicodeDecodeError as error:
                raise UserError(f"{self._path}: row group {number} has text that is not UTF-8 ({error})") from None
            yield from (text or "" for text in texts)


def _skip(file: io.BufferedIOBase, count: int) -> None:
    """Moves on by so many bytes."""
    if file.seekable():
        file.seek(count)
        return
    while count > 0:
        block = file.read(min(_BLOCK, count))
        count = count - len(block) if block else 0


def blocks(path: str, form: Form, start: int, stop: int | None) -> Iterator[bytes]:
    """Bytes start .. stop (None: to the end) of what the file holds, in blocks of at most 256 KiB."""
    with opened(path, form) as file:
        _skip(file, start)
        left = stop - start if stop is not None else None
        while left is None or left > 0:
            block = file.read(_BLOCK if left is None else min(_BLOCK, left))
            if not block:
                return
            left = left - len(block) if left is not None else None
            yield block
