"""Tokens, made once and stored: memory-mapped files under a key of all that determines them, checked when opened.

    CACHE/tokens/KEY/ train.bin train.idx      Megatron's pair: tokens, and where documents end
                      validation.bin .idx
                      tokenizer files          as Tokenizer.save writes them
                      manifest.json            where the text came from, counts, a CRC-32 of each chunk of each file

A store is built in a folder of its own and renamed into place, so that it is whole or absent, and two processes may
build the same one. It is never deleted, mended or rebuilt in silence: a damaged one is refused by name.
`jaxgpt data prepare` makes such a folder anywhere, and --data takes it as it is.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from jaxgpt.data import checksums, files, megatron, prepare, sources
from jaxgpt.data.build import FORMAT, MANIFEST, PARTS, Say, Wanted, fill, settle, text_bytes
from jaxgpt.data.loader import samples_in
from jaxgpt.data.megatron import Documents
from jaxgpt.data.sources import Source
from jaxgpt.data.tokenizer import NAMES, BytesTokenizer, Tokenizer, check_size, load_tokenizer, open_tokenizer
from jaxgpt.data.workers import Workers, cores
from jaxgpt.errors import UserError, require

_SHARED = 2**25
"""Bytes on disk from which on several processes are worth their start."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A corpus as tokens, in two parts that share none."""

    tokenizer: Tokenizer
    train: Integer[np.ndarray, " train_tokens"]
    """Memory-mapped, as validation is."""
    validation: Integer[np.ndarray, " validation_tokens"]
    validation_bytes: int | None
    """UTF-8 bytes that the validation tokens stand for; the end-of-text token stands for none. None: not known."""
    documents: Documents
    """Where those of the train part begin ..."""
    validation_documents: Documents
    """... and those of the validation part."""
    manifest: dict[str, Any]
    """What the store's manifest.json says, with the source as it was named this time."""
    foreign: bool = False
    """Whether others have made the tokens, so that they are checked as they are read."""

    def check(self, seq: int, named: str = "") -> None:
        """Raises UserError unless each part holds a sample of seq + 1 tokens. named: the source, in a blend."""
        of = f" of {named}" if named else ""
        samples_in(self.train, seq, f"training part{of}")
        samples_in(self.validation, seq, f"validation part{of}")

    @property
    def fingerprint(self) -> str:
        """Of the tokens and the tokenizer: the same for the same ones, wherever they lie."""
        # Where documents end has been stored since format 2; what the tokens are has not changed.
        kept = {name: found for name, found in self.manifest["checksums"].items() if not name.endswith(".idx")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Text:
    """A text as tokens, all of them to be evaluated."""

    tokens: Integer[np.ndarray, " tokens"]
    bytes: int
    """UTF-8 bytes that the tokens stand for."""
    documents: Documents
    """Where they begin."""
    description: str


def cache_folder() -> Path:
    """$JAXGPT_CACHE, else $XDG_CACHE_HOME/jaxgpt, else ~/.cache/jaxgpt."""
    if own := os.environ.get("JAXGPT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxgpt"


def open_dataset(
    data: str,
    tokenizer: str | Tokenizer,
    vocab: int,
    validation: float,
    cache: Path | None = None,
    say: Say = lambda line: None,
) -> Dataset:
    """The corpus that a source of --data names, as tokens of --tokenizer, from the cache where it was tokenized before.

    data: see sources.find_documents; or a folder that `jaxgpt data prepare` made, or a pair of Megatron's files, which
    are opened where they are. tokenizer: one, a name of tokenizer.NAMES or a path, see tokenizer.open_tokenizer.
    vocab: most entries the tokenizer may have; a bpe is trained to that many, from the train part alone. validation:
    share of the text's bytes, at its end, kept for validation. say is told what takes time.

    Raises UserError where data, tokenizer or cache cannot be used, or the stored tokens are damaged.
    """
    require(0 < validation < 1, "--validation", validation, "must be above 0 and below 1")
    if is_prepared(data):
        return open_prepared(data, tokenizer, vocab)
    given = given_tokenizer(tokenizer)
    if given is not None:
        check_size(given, vocab)
    if is_megatron(data):
        return _open_megatron(data, given, validation)
    with Workers(processes(data)) as workers:
        source = sources.find_documents(data, workers.map)
        wanted = Wanted(given or str(tokenizer), vocab, validation)
        folder = (cache or cache_folder()) / "tokens" / wanted.key(source)
        try:
            if not folder.exists():
                _build(folder, source, wanted, workers, say)
            return open_store(folder, source.describe())
        except OSError as error:
            raise _unwritable(folder.parent, error) from None


def open_text(data: str, tokenizer: Tokenizer) -> Text:
    """All of the text that data names, as tokens in memory. Raises UserError as open_dataset does."""
    source = sources.find_documents(data)
    spans = sources.whole(source)
    kind = megatron.kind_for(tokenizer.size)
    parts = [(part.astype(kind), end) for part, end in prepare.encode_spans(spans, tokenizer)]
    ends = np.cumsum([len(part) for part, _ in parts])[[end for _, end in parts]]
    tokens = np.concatenate([part for part, _ in parts])
    begin = np.concatenate([[0], ends])
    documents = Documents(len(begin), lambda which: begin[which])
    return Text(tokens, text_bytes(spans, tokenizer), documents, source.describe())


def given_tokenizer(tokenizer: str | Tokenizer) -> Tokenizer | None:
    """The tokenizer, unless it is to be made from the corpus."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer == BytesTokenizer.name:
        return BytesTokenizer()
    return None if tokenizer in NAMES else open_tokenizer(tokenizer)


def processes(data: str) -> int:
    """How many to read and encode a source with: one, unless it is large."""
    try:
        stored = sum(os.path.getsize(path) for _, path in files.find(data))
    except OSError:
        return 1  # said with its name when it is read
    return cores() if stored >= _SHARED else 1


# Building


def _build(folder: Path, source: Source, wanted: Wanted, workers: Workers, say: Say) -> None:
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        fill(temporary, source, wanted, workers, say)
        settle(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Stores a tokenizer in a folder of the cache, whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        tokenizer.save(temporary)
        settle(temporary, folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# Opening


def is_prepared(data: str) -> bool:
    """Whether a source is a folder that `jaxgpt data prepare` made."""
    folder = Path(os.path.expanduser(data))
    return (folder / MANIFEST).is_file() and (folder / "train.bin").exists()


def is_megatron(data: str) -> bool:
    """Whether a source is a pair of Megatron's files, named by one of them or by what comes before the suffixes."""
    path = os.path.expanduser(data)
    return path.endswith((".bin", ".idx")) or (not os.path.exists(path) and os.path.exists(path + ".idx"))


def open_prepared(data: str, tokenizer: str | Tokenizer, vocab: int) -> Dataset:
    """The store in a folder, with its own tokenizer; `tokenizer` must be that one, or leave it open."""
    folder = Path(os.path.expanduser(data))
    try:
        found = open_store(folder, "")
    except OSError as error:
        raise files.unreadable(str(error.filename or folder), error) from None
    given = given_tokenizer(tokenizer)
    if given is not None and given.fingerprint() != found.tokenizer.fingerprint():
        raise UserError(
            f"--data {data}: was prepared with another tokenizer ({found.tokenizer.name}) than --tokenizer "
            f"{given.name}; give --tokenizer {folder}, or prepare it again"
        )
    check_size(found.tokenizer, vocab)
    counts = found.manifest["tokens"]
    found.manifest["source"] = f"{data}: prepared, {sum(counts.values()):,} tokens"
    return found


def open_store(folder: Path, described: str) -> Dataset:
    """A store that is there. Raises UserError where it is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise checksums.damaged(path, "missing") from None
    except ValueError as error:
        raise checksums.damaged(path, f"not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != checksums.digest(manifest):
        raise checksums.damaged(path, "its own checksum differs")
    if manifest["format"] != FORMAT:
        raise UserError(f"{folder}: a token store of format {manifest['format']}, and this is {FORMAT}; make it again")
    for name, expected in manifest["checksums"].items():
        checksums.check(folder / name, expected)
    train, validation = (megatron.read(folder / part) for part in PARTS)
    return Dataset(
        tokenizer=load_tokenizer(folder),
        train=train.tokens,
        validation=validation.tokens,
        validation_bytes=manifest["bytes"]["validation"],
        documents=train.documents,
        validation_documents=validation.documents,
        manifest=manifest | {"source": described, "folder": str(folder)},
    )


def _open_megatron(data: str, tokenizer: Tokenizer | None, validation: float) -> Dataset:
    if tokenizer is None:
        raise UserError(
            f"--data {data}: Megatron's files hold tokens without their tokenizer; give --tokenizer the one that made "
            "them: bytes, a tokenizer.json, or a folder"
        )
    try:
        found = megatron.read(os.path.expanduser(data))
        pair = megatron.pair(os.path.expanduser(data))
        found_checksums = {file.name: checksums.checksums(file, checksums.CHECKED) for file in pair}
    except OSError as error:
        raise files.unreadable(str(error.filename or data), error) from None
    cut = int(len(found.tokens) * (1 - validation))
    train, held_out = found.tokens[:cut], found.tokens[cut:]
    documents, before = len(found.indices) - 1, int(found.documents.until(np.array([cut - 1]))[0]) if cut else 0
    later = Documents(found.documents.count - before, lambda which: found.documents.start(which + before) - cut)
    manifest: dict[str, Any] = {
        "source": f"{data}: Megatron's, {documents:,} documents, {len(found.tokens):,} tokens",
        "tokens": {"train": len(train), "validation": len(held_out)},
        "documents": {"train": before},
        "dtype": found.tokens.dtype.name,
        "validation": validation,
        "tokenizer": {"name": tokenizer.name, "entries": tokenizer.size, "trained_on_bytes": 0},
        "checksums": found_checksums,
        "folder": str(found.path.parent),
    }
    manifest["documents"]["validation"] = documents - manifest["documents"]["train"]
    return Dataset(tokenizer, train, held_out, None, found.documents, later, manifest, foreign=True)


def _unwritable(folder: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{folder}: the disk is full; free some space, or set JAXGPT_CACHE to a folder elsewhere")
    return UserError(
        f"{error.filename or folder}: the token cache cannot be used ({error.strerror or error}); "
        "set JAXGPT_CACHE to a folder that can be written"
    )
