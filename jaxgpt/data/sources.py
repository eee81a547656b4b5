"""Where text comes from: files of text, JSONL or Parquet, compressed or not, as documents in a fixed order."""

import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxgpt.data import files, formats, scan
from jaxgpt.data.files import STDLIB, shown, unreadable
from jaxgpt.data.scan import File, Scanned
from jaxgpt.errors import UserError

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""The builtin map, or Workers.map."""


@dataclass(frozen=True)
class Source:
    """Files in the order in which they are trained on, and what --data named."""

    data: str
    files: tuple[File, ...]
    left_out: tuple[str, ...]
    """Names of binary files of a folder, and of files of the standard library that are not UTF-8."""

    @property
    def size(self) -> int:
        """UTF-8 bytes of all text."""
        return sum(file.size for file in self.files)

    @property
    def documents(self) -> int:
        return sum(file.documents for file in self.files)

    def describe(self) -> str:
        """One line for the console."""
        held = f"{len(self.files):,} file{'s' * (len(self.files) > 1)}, {self.size:,} bytes"
        if self.documents != len(self.files):
            held += f" in {self.documents:,} documents"
        names = ", ".join(shown(name) for name in self.left_out[:3]) + (", ..." if len(self.left_out) > 3 else "")
        return f"{self.data}: {held}" + (f" ({len(self.left_out):,} left out: {names})" if self.left_out else "")


@dataclass(frozen=True)
class Span:
    """Text of a file that is read in one go."""

    file: File
    start: int
    stop: int | None
    """As in Piece."""
    size: int
    """UTF-8 bytes."""
    documents: int
    """That end in it."""
    bounded: bool
    """Whether a boundary follows what ends in it."""
    skip: int = 0
    """Documents at the start that are not its own."""

    @property
    def boundaries(self) -> int:
        return self.documents if self.bounded else 0


# What there is


def find_documents(data: str, run: Map = map) -> Source:
    """The documents of --data, all of them read once: for their digests, and to find what is wrong with them.

    data is a file; a folder, of which all files at any depth are taken but hidden ones, those in hidden folders, and
    binary ones (with a zero byte among their first 8192 bytes); a pattern such as "src/**/*.py", which takes exactly
    the files that it names; or "stdlib", the .py files of the running Python's standard library without its tests and
    installed packages. A file is what its name says (see formats): a text is one document, a JSONL file one a line, a
    Parquet file one a row; the field or column is "text", or what follows a # ("a.jsonl#content"). A file named
    twice, by a link, is taken once. Several files are ordered by a hash of their names, so that the last ones are a
    fair sample of all. run: map, or Workers.map to read with many processes.

    Raises UserError where nothing is there, a file cannot be read, or text is not UTF-8 (with file and offset or line).
    """
    found = files.find(data)
    path, field = files.place_and_field(data)
    library, folder = data == STDLIB, data != STDLIB and os.path.isdir(path)
    left_out, tasks, seen = [], [], set()
    for name, each in found:
        real = os.path.realpath(each)
        if real in seen:
            continue
        seen.add(real)
        form = formats.form_of(name, field)
        if folder and form.kind == "text" and scan.is_binary(each, form):
            left_out.append(name)
        else:
            tasks += scan.tasks(name, each, form, strict=not library)
    taken: dict[str, list[Scanned]] = {}
    for task, scanned in zip(tasks, run(scan.scan, tasks), strict=True):
        if scanned is None:
            left_out.append(task.name)
        else:
            taken.setdefault(task.name, []).append(scanned)
    forms = {task.name: task for task in tasks}
    kept = [file for name, parts in taken.items() if (file := scan.joined_file(forms[name], parts)).size]
    if not kept:
        raise UserError(f"--data {data}: {_nothing(len(seen), len(left_out))}")
    kept.sort(key=lambda file: hashlib.blake2b(_encoded(file.name), digest_size=16).digest())
    return Source(data, tuple(kept), tuple(left_out))


# Train and validation


def whole(source: Source) -> list[Span]:
    """All of the source, as spans."""
    spans = []
    for file in source.files:
        table = file.form.kind != "text"
        for p in file.pieces:
            bounded = table or file is not source.files[-1]
            spans.append(Span(file, p.start, p.stop, p.size, p.documents, bounded))
    return spans


def split(source: Source, validation: float) -> tuple[list[Span], list[Span]]:
    """The source's train and validation spans: the last `validation` share of the bytes is for validation.

    The cut lies in the text, not in the tokens, so that it is the same for every tokenizer and a tokenizer can be
    trained without having seen the validation text. It may divide a text file, at the start of a character, but no
    document of JSONL or Parquet: the one in which it falls is trained on.
    """
    cut = int(source.size * (1 - validation))
    train: list[Span] = []
    held_out: list[Span] = []
    passed = 0
    for span in whole(source):
        at = min(max(cut - passed, 0), span.size)
        before, after = _divided(span, at) if 0 < at < span.size else (span, span)
        if at and before.size:
            train.append(before)
        if at < span.size and after.size:
            held_out.append(after)
        passed += span.size
    return train, held_out


def _divided(span: Span, at: int) -> tuple[Span, Span]:
    """What lies before and after `at` bytes of a span's text."""
    if span.file.form.kind == "text":
        place = character_start(span.file, span.start + at)
        before = replace(span, stop=place, size=place - span.start, documents=0, bounded=False)
        return before, replace(span, start=place, size=span.size - before.size)
    count = size = 0
    for text, _ in read(span):
        if size >= at:
            break
        count, size = count + 1, size + len(text.encode())
    before = replace(span, size=size, documents=count)
    return before, replace(span, size=span.size - size, documents=span.documents - count, skip=span.skip + count)


def character_start(file: File, offset: int) -> int:
    """The start of the character that holds the byte at offset."""
    first = max(offset - 3, 0)
    try:
        around = b"".join(formats.blocks(file.path, file.form, first, offset + 1))
    except OSError as error:
        raise unreadable(file.path, error) from None
    # Bytes 10xxxxxx continue a character.
    return offset - next((back for back, byte in enumerate(reversed(around)) if byte & 0xC0 != 0x80), 0)


# Reading


def read(span: Span) -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends with it) in turn; of a text file at most 256 KiB at once.

    Raises UserError where the file has changed since it was found.
    """
    try:
        _refuse_changed(span.file)
        if span.file.form.kind == "text":
            yield from _read_text(span)
            return
        left = span.documents
        for number, text in enumerate(scan.texts(span.file.path, span.file.form, span.start, span.stop)):
            if number >= span.skip and left:
                left -= 1
                yield text, True
            if not left:
                break
        _refuse_changed(span.file)
        if left:
            raise _changed(span.file)
    except OSError as error:
        raise unreadable(span.file.path, error) from None


def texts(spans: Iterable[Span]) -> Iterator[str]:
    """The text of spans, in pieces."""
    return (text for span in spans for text, _ in read(span))


def _read_text(span: Span) -> Iterator[tuple[str, bool]]:
    file, left = span.file, span.size
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in formats.blocks(file.path, file.form, span.start, span.stop):
        _refuse_changed(file)
        left -= len(block)
        yield decoder.decode(block, final=not left), not left and bool(span.documents)
    if left:
        raise _changed(file)


def _refuse_changed(file: File) -> None:
    now = os.stat(file.path)
    if (now.st_size, now.st_mtime_ns) != (file.stored, file.modified):
        raise _changed(file)


def _changed(file: File) -> UserError:
    return UserError(f"{shown(file.path)}: the file changed while it was read; run again when it is still")


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _nothing(found: int, left_out: int) -> str:
    if not found:
        return "no files there; name a text file, a folder of text files, or a pattern such as 'src/**/*.py'"
    if left_out:
        return f"holds no text ({left_out} binary and {found - left_out} empty files); name files of UTF-8 text"
    return "the file is empty" if found == 1 else f"all {found} files are empty"
