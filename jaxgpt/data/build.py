"""A token store made from a source: its tokenizer, both parts, and the manifest that says what is there."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.data import checksums, megatron, prepare, sources
from jaxgpt.data.prepare import Told
from jaxgpt.data.sources import Source, Span
from jaxgpt.data.tokenizer import CharsTokenizer, Tokenizer, check_size, load_tokenizer, train_bpe
from jaxgpt.data.workers import Workers
from jaxgpt.errors import UserError

FORMAT = 2
MANIFEST = "manifest.json"
PARTS = ("train", "validation")
_BPE_BYTES = 2**13
"""Most bytes of text an entry that a BPE is trained on, but never less than for 2048 entries (16 MiB)."""

_MADE = ".made"
"""While a store is built: its tokenizer is there, made from so many bytes."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What determines a store's tokens beside its source."""

    tokenizer: Tokenizer | str
    """One, or a name of NAMES: to be made from the source."""
    vocab: int
    validation: float

    def key(self, source: Source) -> str:
        """Determines the tokens that a store of this source has."""
        kind = self.tokenizer if isinstance(self.tokenizer, str) else self.tokenizer.fingerprint()
        found = [(file.name, file.size, file.digest) for file in source.files]
        content = json.dumps([FORMAT, found, kind, self.vocab, self.validation])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def fill(
    folder: Path,
    source: Source,
    wanted: Wanted,
    workers: Workers,
    say: Say,
    told: Told = lambda done, all: None,
) -> None:
    """Makes a store in an existing folder, which may hold parts of an earlier attempt at it; the manifest last."""
    vocab, validation = wanted.vocab, wanted.validation
    train, held_out = sources.split(source, validation)
    tokenizer, learned_from = _tokenizer(folder, train, held_out, wanted, say)
    check_size(tokenizer, vocab)
    say(f"encoding {source.size:,} bytes as {tokenizer.name}")
    kind = megatron.kind_for(vocab)
    spans = dict(zip(PARTS, (train, held_out), strict=True))
    counts = prepare.write(folder, spans, tokenizer, kind, workers.map, told)
    for part, (tokens, _) in counts.items():
        if not tokens:
            raise UserError(
                f"--data {source.data}: its {source.size} bytes leave no token for the {part} part; take more "
                "text or another --validation"
            )
    manifest = {
        "format": FORMAT,
        "key": wanted.key(source),
        "files": [{"name": file.name, "bytes": file.size} for file in source.files],
        "bytes": {"train": text_bytes(train, tokenizer), "validation": text_bytes(held_out, tokenizer)},
        "tokens": {part: tokens for part, (tokens, _) in counts.items()},
        "documents": {part: documents for part, (_, documents) in counts.items()},
        "dtype": kind.name,
        "validation": validation,
        "tokenizer": {"name": tokenizer.name, "entries": tokenizer.size, "trained_on_bytes": learned_from},
        "checksums": {file.name: checksums.checksums(file) for file in sorted(folder.iterdir()) if _is_kept(file)},
    }
    text = json.dumps(manifest | {"checksum": checksums.digest(manifest)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    shutil.rmtree(folder / "parts")
    (folder / _MADE).unlink()


def _tokenizer(
    folder: Path, train: list[Span], held_out: list[Span], wanted: Wanted, say: Say
) -> tuple[Tokenizer, int]:
    """The store's tokenizer, saved in its folder, and how many bytes it was made from; an earlier attempt's is kept."""
    made = folder / _MADE
    if made.exists():
        return load_tokenizer(folder), int(made.read_text())
    given = wanted.tokenizer
    if isinstance(given, Tokenizer):
        tokenizer, learned_from = given, 0
    else:
        tokenizer, learned_from = made_tokenizer(given, train, held_out, wanted.vocab, say)
    tokenizer.save(folder)
    made.write_text(str(learned_from))
    return tokenizer, learned_from


def made_tokenizer(name: str, train: list[Span], held_out: list[Span], vocab: int, say: Say) -> tuple[Tokenizer, int]:
    """A tokenizer made from the corpus, and how many bytes it was made from."""
    if name == CharsTokenizer.name:
        characters: set[str] = set()
        for text in sources.texts(train + held_out):
            characters.update(text)
        if any(span.bounded for span in train + held_out):
            characters.update(CharsTokenizer.boundary)
        return CharsTokenizer(characters), _size(train + held_out)
    share = min(1.0, _BPE_BYTES * max(vocab, 2048) / max(_size(train), 1))
    say(f"training a bpe of {vocab:,} entries on {share:.0%} of the train part's {_size(train):,} bytes")
    used = []

    def sample() -> Iterator[str]:
        for number, piece in enumerate(sources.texts(train)):
            if int((number + 1) * share) > int(number * share):
                used.append(len(piece.encode()))
                yield piece

    return train_bpe(sample(), vocab), sum(used)


def settle(temporary: Path, folder: Path) -> None:
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


def _is_kept(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".") and file.name != MANIFEST


def _size(spans: list[Span]) -> int:
    return sum(span.size for span in spans)


def text_bytes(spans: list[Span], tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the spans and of the boundaries between them, where those are text."""
    boundary = 0 if tokenizer.end is not None else len(tokenizer.boundary.encode())
    return _size(spans) + boundary * sum(span.boundaries for span in spans)
