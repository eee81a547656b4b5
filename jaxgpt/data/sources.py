"""Where text comes from: a file, a folder, a pattern or the Python standard library, as documents in a fixed order."""

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.errors import UserError

STDLIB = "stdlib"
_BLOCK = 2**18
"""Bytes read at once."""
_SNIFFED = 8192
"""Bytes at a file's start in which a zero byte tells a binary file."""
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders below the standard library that hold tests or other people's packages."""


@dataclass(frozen=True)
class Document:
    """One file that is not empty."""

    name: str
    """Path below the folder it was found in, with slashes: the same on every machine."""
    path: str
    size: int
    """Bytes."""
    modified: int
    """Time of its last change, nanoseconds."""
    digest: str
    """BLAKE2b of its bytes, 16 bytes as hexadecimal digits."""


@dataclass(frozen=True)
class Source:
    """Documents in the order in which they are trained on, and what --data named."""

    data: str
    documents: tuple[Document, ...]
    left_out: tuple[str, ...]
    """Names of binary files of a folder, and of files of the standard library that are not UTF-8."""

    @property
    def size(self) -> int:
        """Bytes of all documents."""
        return sum(document.size for document in self.documents)

    def describe(self) -> str:
        """One line for the console."""
        files = f"{len(self.documents):,} file{'s' * (len(self.documents) > 1)}, {self.size:,} bytes"
        names = ", ".join(_shown(name) for name in self.left_out[:3]) + (", ..." if len(self.left_out) > 3 else "")
        return f"{self.data}: {files}" + (f" ({len(self.left_out):,} left out: {names})" if self.left_out else "")


@dataclass(frozen=True)
class Span:
    """Bytes start .. stop of a document."""

    document: Document
    start: int
    stop: int
    bounded: bool
    """Whether a boundary between documents follows."""


def find_documents(data: str) -> Source:
    """The documents of --data, every byte of them read once for their digests.

    data is a text file; a folder, of which all files at any depth are taken but hidden ones, those in hidden
    folders, and binary ones (with a zero byte among their first 8192 bytes); a pattern such as "src/**/*.py", which
    takes exactly the files that it names; or "stdlib", the .py files of the running Python's standard library without
    its tests and installed packages. A file named twice, by a link, is taken once. Several documents are ordered by
    a hash of their names, so that the last ones are a fair sample of all.

    Raises UserError where nothing is there, a file cannot be read, or text is not UTF-8 (with file and offset).
    """
    library = data == STDLIB
    found = _library_files() if library else _files(data)
    folder = not library and os.path.isdir(os.path.expanduser(data))
    documents, left_out, seen = [], [], set()
    for name, path in sorted(found):
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        document = None if folder and _binary(path) else _document(name, path, strict=not library)
        if document is None:
            left_out.append(name)
        elif document.size:
            documents.append(document)
    if not documents:
        raise UserError(f"--data {data}: {_nothing(len(seen), len(left_out))}")
    documents.sort(key=lambda document: hashlib.blake2b(_encoded(document.name), digest_size=16).digest())
    return Source(data, tuple(documents), tuple(left_out))


def split(source: Source, validation: float) -> tuple[list[Span], list[Span]]:
    """The source's train and validation spans: the last `validation` share of the bytes is for validation.

    The cut lies in the text, not in the tokens, so that it is the same for every tokenizer and a tokenizer can be
    trained without having seen the validation text. It may divide a document, at the start of a character.
    """
    cut = int(source.size * (1 - validation))
    train: list[Span] = []
    held_out: list[Span] = []
    passed = 0
    for document in source.documents:
        bounded = document is not source.documents[-1]
        at = min(max(cut - passed, 0), document.size)
        if 0 < at < document.size:
            at = _character_start(document, at)
        if at:
            train.append(Span(document, 0, at, bounded and at == document.size))
        if at < document.size:
            held_out.append(Span(document, at, document.size, bounded))
        passed += document.size
    return train, held_out


def whole(source: Source) -> list[Span]:
    """All of the source, as spans."""
    return [Span(d, 0, d.size, bounded=d is not source.documents[-1]) for d in source.documents]


def read(span: Span) -> Iterator[str]:
    """The span's text in pieces of at most 256 KiB. Raises UserError where the file has changed since it was found."""
    document = span.document
    position = span.start
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with open(document.path, "rb") as file:
            file.seek(span.start)
            while position < span.stop:
                block = file.read(min(_BLOCK, span.stop - position))
                now = os.fstat(file.fileno())
                if not block or (now.st_size, now.st_mtime_ns) != (document.size, document.modified):
                    raise UserError(
                        f"{_shown(document.path)}: the file changed while it was read; run again when it is still"
                    )
                position += len(block)
                yield decoder.decode(block, final=position == span.stop)
    except OSError as error:
        raise _unreadable(document.path, error) from None


def _files(data: str) -> list[tuple[str, str]]:
    """(name, path) of each file that --data names."""
    path = os.path.expanduser(data)
    if os.path.isdir(path):
        return list(_walk(path))
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise UserError(f"--data {data}: neither a file nor a folder; store the text in a file first")
        return [(os.path.basename(path), path)]
    if not glob.has_magic(path):
        raise UserError(f'--data {data}: no such file or folder; "{STDLIB}" is the Python standard library\'s source')
    root = _fixed_folder(path)
    return [(_name(match, root), match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]


def _walk(root: str) -> Iterator[tuple[str, str]]:
    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error)

    for folder, folders, files in os.walk(root, onerror=refuse):
        if ".lock" in files and "config.json" in files:  # a run, written while this is read: its text is not data
            folders[:], files = [], []
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            path = os.path.join(folder, file)
            # A link to nowhere is kept, to be refused by name; sockets and pipes are no text.
            if not file.startswith(".") and (os.path.isfile(path) or os.path.islink(path)):
                yield _name(path, root), path


def _library_files() -> list[tuple[str, str]]:
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY]
        # _sysconfigdata is written when Python is built and holds that machine's paths.
        source = [file for file in files if file.endswith(".py") and not file.startswith("_sysconfigdata")]
        found += [(_name(os.path.join(folder, file), root), os.path.join(folder, file)) for file in source]
    if not found:
        raise UserError(f"--data {STDLIB}: this Python has no library source in {root}; name a text file or folder")
    return found


def _document(name: str, path: str, strict: bool) -> Document | None:
    """The file's document. Where it is not UTF-8: UserError if strict, else None."""
    digest = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            while block := file.read(_BLOCK):
                digest.update(block)
                offset -= len(decoder.getstate()[0])
                decoder.decode(block)
                offset = file.tell()
            offset -= len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        if not strict:
            return None
        raise UserError(
            f"{_shown(path)}: not UTF-8 at byte {offset + error.start} ({error.reason}); convert the file to UTF-8, "
            "or take a pattern that leaves it out"
        ) from None
    return Document(name, path, status.st_size, status.st_mtime_ns, digest.hexdigest())


def _binary(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            start = file.read(_SNIFFED)
    except OSError as error:
        raise _unreadable(path, error) from None
    return b"\0" in start and not start.startswith(_UTF16_MARKS)


def _character_start(document: Document, offset: int) -> int:
    """The start of the character that holds the byte at offset."""
    try:
        with open(document.path, "rb") as file:
            file.seek(max(offset - 3, 0))
            around = file.read(min(offset, 3) + 1)
    except OSError as error:
        raise _unreadable(document.path, error) from None
    # Bytes 10xxxxxx continue a character.
    return offset - next((back for back, byte in enumerate(reversed(around)) if byte & 0xC0 != 0x80), 0)


def _fixed_folder(pattern: str) -> str:
    """The folder before the pattern's first wildcard."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return os.path.join(*parts[:fixed]) if fixed else ""


def _name(path: str, root: str) -> str:
    return Path(os.path.relpath(path, root or ".")).as_posix()


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _shown(name: str) -> str:
    """The name as it can be printed, whatever bytes it has on disk."""
    return os.fsencode(name).decode("utf-8", "replace")


def _nothing(files: int, left_out: int) -> str:
    if not files:
        return "no files there; name a text file, a folder of text files, or a pattern such as 'src/**/*.py'"
    if left_out:
        return f"holds no text ({left_out} binary and {files - left_out} empty files); name files of UTF-8 text"
    return "the file is empty" if files == 1 else f"all {files} files are empty"


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"{_shown(path)}: cannot be read ({error.strerror or error}); check the path and its permissions")
