"""Tokens, made once and stored: memory-mapped files under a key of all that determines them, checked when opened.

    CACHE/tokens/KEY/ train.bin validation.bin  tokens, little-endian uint16 (uint32 above 65536 entries)
                      tokenizer files           as Tokenizer.save writes them
                      manifest.json             where the text came from, counts, a CRC-32 of each chunk of each file

A store is built in a folder of its own and renamed into place, so that it is whole or absent, and two processes may
build the same one. It is never deleted, mended or rebuilt in silence: a damaged one is refused by name.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from jaxgpt.data import sources
from jaxgpt.data.loader import samples_in
from jaxgpt.data.sources import Source, Span
from jaxgpt.data.tokenizer import (
    NAMES,
    BytesTokenizer,
    CharsTokenizer,
    Tokenizer,
    check_size,
    load_tokenizer,
    open_tokenizer,
    train_bpe,
)
from jaxgpt.errors import UserError, require

_FORMAT = 1
_MANIFEST = "manifest.json"
_CHUNK = 2**22
"""Bytes under one checksum."""
_CHECKED = 128
"""Most chunks checked on opening (512 MiB, about half a second); of a larger store as many, evenly spread."""
_BATCH = 2**22
"""Characters given to the tokenizer at once."""
_BPE_BYTES = 2**13
"""Most bytes of text an entry that a BPE is trained on, but never less than for 2048 entries (16 MiB)."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A corpus as tokens, in two parts that share none."""

    tokenizer: Tokenizer
    train: UInt[np.ndarray, " train_tokens"]
    """Memory-mapped, as validation is."""
    validation: UInt[np.ndarray, " validation_tokens"]
    validation_bytes: int
    """UTF-8 bytes that the validation tokens stand for; the end-of-text token stands for none."""
    manifest: dict[str, Any]
    """What the store's manifest.json says, with the source as it was named this time."""

    def check(self, seq: int) -> None:
        """Raises UserError unless each part holds a sample of seq + 1 tokens."""
        samples_in(self.train, seq, "training part")
        samples_in(self.validation, seq, "validation part")


@dataclass(frozen=True, eq=False)
class Text:
    """A text as tokens, all of them to be evaluated."""

    tokens: UInt[np.ndarray, " tokens"]
    bytes: int
    """UTF-8 bytes that the tokens stand for."""
    description: str


def cache_folder() -> Path:
    """$JAXGPT_CACHE, else $XDG_CACHE_HOME/jaxgpt, else ~/.cache/jaxgpt."""
    if own := os.environ.get("JAXGPT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxgpt"


def open_dataset(
    data: str,
    tokenizer: str,
    vocab: int,
    validation: float,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """The corpus that --data names, as tokens of --tokenizer, from the cache where it was tokenized before.

    data: see sources.find_documents. tokenizer: a name of tokenizer.NAMES or a path, see tokenizer.open_tokenizer.
    vocab: most entries the tokenizer may have; a bpe is trained to that many, from the train part alone.
    validation: share of the text's bytes, at its end, kept for validation. say is told what takes time.

    Raises UserError where data, tokenizer or cache cannot be used, or the stored tokens are damaged.
    """
    require(0 < validation < 1, "--validation", validation, "must be above 0 and below 1")
    given = _given(tokenizer)
    if given is not None:
        check_size(given, vocab)
    source = sources.find_documents(data)
    kind = given.fingerprint() if given is not None else tokenizer
    folder = (cache or cache_folder()) / "tokens" / _key(source, kind, vocab, validation)
    try:
        if not folder.exists():
            _build(folder, source, given, tokenizer, vocab, validation, say)
        return _open(folder, source)
    except OSError as error:
        raise _unwritable(folder.parent, error) from None


def open_text(data: str, tokenizer: Tokenizer) -> Text:
    """All of the text that data names, as tokens in memory. Raises UserError as open_dataset does."""
    source = sources.find_documents(data)
    spans = sources.whole(source)
    kind = _dtype(tokenizer.size)
    tokens = np.concatenate([part.astype(kind) for part in _encode(spans, tokenizer)])
    return Text(tokens, _bytes(spans, tokenizer), source.describe())


def _given(tokenizer: str) -> Tokenizer | None:
    """The tokenizer, unless it is to be made from the corpus."""
    if tokenizer == BytesTokenizer.name:
        return BytesTokenizer()
    return None if tokenizer in NAMES else open_tokenizer(tokenizer)


def _key(source: Source, kind: str, vocab: int, validation: float) -> str:
    files = [(document.name, document.size, document.digest) for document in source.documents]
    content = json.dumps([_FORMAT, files, kind, vocab, validation])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _build(
    folder: Path,
    source: Source,
    given: Tokenizer | None,
    name: str,
    vocab: int,
    validation: float,
    say: Callable[[str], None],
) -> None:
    train, held_out = sources.split(source, validation)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        tokenizer, learned_from = (given, 0) if given else _make(name, train, held_out, vocab, say)
        check_size(tokenizer, vocab)
        tokenizer.save(temporary)
        say(f"encoding {source.size:,} bytes as {tokenizer.name}")
        tokens = {}
        for part, spans in {"train": train, "validation": held_out}.items():
            tokens[part] = _write(temporary / f"{part}.bin", _encode(spans, tokenizer), _dtype(vocab))
            if not tokens[part]:
                raise UserError(
                    f"--data {source.data}: its {source.size} bytes leave no token for the {part} part; take more "
                    "text or another --validation"
                )
        manifest = {
            "format": _FORMAT,
            "files": [{"name": document.name, "bytes": document.size} for document in source.documents],
            "bytes": {"train": _bytes(train, tokenizer), "validation": _bytes(held_out, tokenizer)},
            "tokens": tokens,
            "dtype": _dtype(vocab).name,
            "validation": validation,
            "tokenizer": {"name": tokenizer.name, "entries": tokenizer.size, "trained_on_bytes": learned_from},
            "checksums": {file.name: _checksums(file) for file in sorted(temporary.iterdir())},
        }
        (temporary / _MANIFEST).write_text(
            json.dumps(manifest | {"checksum": _digest(manifest)}, indent=1), encoding="utf-8"
        )
        _settle(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make(
    name: str, train: list[Span], held_out: list[Span], vocab: int, say: Callable[[str], None]
) -> tuple[Tokenizer, int]:
    """A tokenizer made from the corpus, and how many bytes it was made from."""
    if name == CharsTokenizer.name:
        characters: set[str] = set()
        for span in train + held_out:
            characters.update(*sources.read(span))
        if any(span.bounded for span in train + held_out):
            characters.update(CharsTokenizer.boundary)
        return CharsTokenizer(characters), _size(train + held_out)
    share = min(1.0, _BPE_BYTES * max(vocab, 2048) / max(_size(train), 1))
    say(f"training a bpe of {vocab:,} entries on {share:.0%} of the train part's {_size(train):,} bytes")
    used = []

    def sample() -> Iterator[str]:
        for number, piece in enumerate(chain.from_iterable(map(sources.read, train))):
            if int((number + 1) * share) > int(number * share):
                used.append(len(piece.encode()))
                yield piece

    return train_bpe(sample(), vocab), sum(used)


def _encode(spans: list[Span], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The spans' tokens, boundaries included; no more than a batch of text is held at once."""
    batch: list[str] = []
    characters = 0
    for piece in _pieces(spans, tokenizer):
        batch.append(piece)
        characters += len(piece)
        if characters >= _BATCH:
            yield from tokenizer.encode_many(batch)
            batch, characters = [], 0
    yield from tokenizer.encode_many(batch)


def _pieces(spans: list[Span], tokenizer: Tokenizer) -> Iterator[str]:
    """The spans' text, divided only where that changes no token."""
    for span in spans:
        rest = ""
        for text in sources.read(span):
            rest += text
            at = tokenizer.cut(rest)
            if at:
                yield rest[:at]
            rest = rest[at:]
        if rest:
            yield rest
        if span.bounded:
            yield tokenizer.boundary


def _write(path: Path, arrays: Iterator[np.ndarray], kind: np.dtype) -> int:
    """Writes the tokens; returns how many."""
    with open(path, "wb") as file:
        for array in arrays:
            file.write(array.astype(kind).tobytes())
        return file.tell() // kind.itemsize


def _settle(temporary: Path, folder: Path) -> None:
    """Moves a whole store into place, unless another process was first."""
    for path in [*temporary.iterdir(), temporary]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _open(folder: Path, source: Source) -> Dataset:
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _damaged(path, "missing") from None
    except ValueError as error:
        raise _damaged(path, f"not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != _digest(manifest):
        raise _damaged(path, "its own checksum differs")
    for name, checksums in manifest["checksums"].items():
        _check(folder / name, checksums)
    kind = np.dtype(manifest["dtype"]).newbyteorder("<")
    return Dataset(
        tokenizer=load_tokenizer(folder),
        train=np.memmap(folder / "train.bin", kind, "r"),
        validation=np.memmap(folder / "validation.bin", kind, "r"),
        validation_bytes=manifest["bytes"]["validation"],
        manifest=manifest | {"source": source.describe(), "folder": str(folder)},
    )


def _checksums(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        chunks = [zlib.crc32(chunk) for chunk in iter(lambda: file.read(_CHUNK), b"")]
    return {"bytes": path.stat().st_size, "crc32": chunks}


def _check(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _damaged(path, f"{size} bytes in place of {expected['bytes']}")
        chunks = expected["crc32"]
        with open(path, "rb") as file:
            for number in np.linspace(0, len(chunks) - 1, min(len(chunks), _CHECKED), dtype=int).tolist():
                file.seek(number * _CHUNK)
                if zlib.crc32(file.read(_CHUNK)) != chunks[number]:
                    raise _damaged(path, f"the checksum of the {_CHUNK} bytes at {number * _CHUNK} differs")
    except FileNotFoundError:
        raise _damaged(path, "missing") from None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged token store ({what}); delete the folder {path.parent} and run again")


def _unwritable(folder: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{folder}: the disk is full; free some space, or set JAXGPT_CACHE to a folder elsewhere")
    return UserError(
        f"{error.filename or folder}: the token cache cannot be used ({error.strerror or error}); "
        "set JAXGPT_CACHE to a folder that can be written"
    )


def _dtype(vocab: int) -> np.dtype:
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def _size(spans: list[Span]) -> int:
    return sum(span.stop - span.start for span in spans)


def _bytes(spans: list[Span], tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the spans and of the boundaries between them, where those are text."""
    boundary = 0 if tokenizer.end is not None else len(tokenizer.boundary.encode())
    return _size(spans) + boundary * sum(span.bounded for span in spans)
