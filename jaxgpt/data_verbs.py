"""`jaxgpt data`: sources made into tokens once, looked at, and blended. Nothing here needs JAX."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jaxgpt.arguments import parse, verb_of
from jaxgpt.data import blend, build, megatron, open_mixture, sources, store
from jaxgpt.data.prepare import Told
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.workers import Workers, cores
from jaxgpt.errors import UserError, require
from jaxgpt.file_flags import BlendFlags, InspectFlags, PrepareFlags
from jaxgpt.training.console import Console, Rows, size

HELP = """usage: jaxgpt data VERB [flags]

  prepare   tokenize a source once, with all cores, into a folder that --data takes; goes on where it was cut off
  inspect   documents, tokens, splits, checksum and decoded documents
  blend     what a blend takes of each source

jaxgpt data VERB --help lists a verb's flags."""

BPE_ENTRIES = 32_768
MOST = 100_000_000
"""Samples of a blend looked at, all of them at once."""
_PLAN, _LOCK = ".plan", ".lock"
_SHOWN = 400
"""Most characters shown of a document."""


def main(args: list[str]) -> int:
    """Runs one of the verbs, and returns its exit status. Raises UserError."""
    verbs: dict[str, tuple[type, Callable[[Any, Console], None]]] = {
        "prepare": (PrepareFlags, prepare),
        "inspect": (InspectFlags, inspect),
        "blend": (BlendFlags, show_blend),
    }
    found = verb_of(verbs, args, HELP, "data")
    if found is not None:
        (kind, run), verb, rest = found
        run(parse(verb, kind, rest), Console())
    return 0


def prepare(asked: PrepareFlags, console: Console) -> None:
    """Makes a folder of tokens. Raises UserError where data cannot be read, or the folder is something else's."""
    require(0 < asked.validation < 1, "--validation", asked.validation, "must be above 0 and below 1")
    require(asked.workers is None or asked.workers >= 1, "--workers", asked.workers, "must be at least 1")
    require(asked.vocab is None or asked.vocab >= 1, "--vocab", asked.vocab, "must be at least 1")
    for wrong, what in ((blend.is_blend, "a blend"), (store.is_megatron, "tokens"), (store.is_prepared, "tokens")):
        if wrong(asked.data):
            raise UserError(f"--data {asked.data}: is {what}; prepare takes one source of text, and train the rest")
    given = store.given_tokenizer(asked.tokenizer)
    vocab = asked.vocab or (BPE_ENTRIES if given is None else given.size)
    wanted = build.Wanted(asked.tokenizer if given is None else given, vocab, asked.validation)
    with Workers(asked.workers or cores()) as workers:
        source = sources.find_documents(asked.data, workers.map)
        console.say(source.describe())
        key = wanted.key(source)
        if not _is_there(asked.out, key):
            with _work(asked.out, key) as folder, _progress(console) as told:
                build.fill(folder, source, wanted, workers, console.say, told)
                for name in (_PLAN, _LOCK):
                    (folder / name).unlink()
                build.settle(folder, asked.out)
    found = store.open_store(asked.out, source.describe())
    console.table(f"{asked.out}: to train on it, --data {asked.out}", _facts(found))


def inspect(asked: InspectFlags, console: Console) -> None:
    """Says what is in data. Raises UserError."""
    require(asked.documents >= 0, "--documents", asked.documents, "must be at least 0")
    if store.is_prepared(asked.data):
        found = store.open_prepared(asked.data, "bpe", 2**31)
        console.table(asked.data, _facts(found))
        _show(found.train, found.documents, found.tokenizer, asked.documents, console)
    elif store.is_megatron(asked.data):
        tokens = megatron.read(os.path.expanduser(asked.data))
        tokenizer = store.given_tokenizer(asked.tokenizer)
        rows = [
            ("documents", len(tokens.indices) - 1),
            ("sequences", len(tokens.lengths)),
            ("tokens", len(tokens.tokens)),
            ("type of a token", tokens.tokens.dtype.name),
            ("checksum", _digest(tokens.path)),
        ]
        console.table(asked.data, rows)
        _show(tokens.tokens, tokens.documents, tokenizer, asked.documents, console)
    else:
        with Workers(store.processes(asked.data)) as workers:
            source = sources.find_documents(asked.data, workers.map)
        rows = [("files", len(source.files)), ("documents", source.documents), ("bytes of text", source.size)]
        console.table(source.describe(), rows)
        for text, _ in zip(sources.texts(sources.whole(source)), range(asked.documents), strict=False):
            console.say(f"---\n{text[:_SHOWN]}")


def show_blend(asked: BlendFlags, console: Console) -> None:
    """Says what a blend takes. Raises UserError."""
    require(1 <= asked.samples <= MOST, "--samples", asked.samples, f"must be at least 1 and at most {MOST}")
    require(0 <= asked.seed < 2**64, "--seed", asked.seed, "must be at least 0 and below 2^64")
    require(asked.seq >= 1, "--seq", asked.seq, "must be at least 1")
    mixture = open_mixture(asked.data, asked.tokenizer, asked.vocab, asked.validation, say=console.say)
    mixture.check(asked.seq)
    samples, whole = mixture.samples(asked.seq), sum(mixture.weights)
    rows: list[tuple[object, ...]] = [
        ("source", "share", "tokens", "samples", f"of the first {asked.samples:,}", "epochs")
    ]
    for part, dataset, count, taken in zip(
        mixture.parts, mixture.datasets, samples, mixture.taken(asked.samples), strict=True
    ):
        share = f"{part.weight / whole:.6g}"
        tokens = f"{len(dataset.train):,}"
        rows.append((part.data, share, tokens, f"{count:,}", f"{taken:,}", f"{taken / count:.3g}"))
    console.table(mixture.describe(), rows)
    source, index = mixture.order(asked.seq, asked.seed, np.arange(asked.samples))
    order = np.stack([source, index]).astype("<i8").tobytes()
    console.say(f"checksum of the order, seed {asked.seed}: {hashlib.sha256(order).hexdigest()}")


# Preparing


def _is_there(out: Path, key: str) -> bool:
    """Whether the same has been prepared before. Raises UserError where the folder is something else's."""
    if not out.exists():
        return False
    if store.is_prepared(str(out)) and store.open_store(out, "").manifest["key"] == key:
        return True
    raise UserError(f"--out {out}: is there already, and is not this data prepared like this; give another folder")


@contextmanager
def _work(out: Path, key: str) -> Iterator[Path]:
    """The folder beside `out` in which it is made, for this process alone; what an earlier attempt left is kept."""
    folder = out.with_name(out.name + ".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {folder} cannot be made ({error.strerror}); give another folder") from None
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another process is preparing it; wait for it, or end it") from None
        plan = folder / _PLAN
        if plan.exists() and plan.read_text() != key:
            raise UserError(
                f"{folder}: holds the unfinished preparation of other data or another tokenizer; "
                "delete it, or give another --out"
            )
        plan.write_text(key)
        yield folder


@contextmanager
def _progress(console: Console) -> Iterator[Told]:
    """A bar on a terminal, a line each tenth elsewhere."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("encoding"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=rich.console.Console()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


def _lines(console: Console) -> Told:
    said = -1

    def told(done: int, whole: int) -> None:
        nonlocal said
        tenths = 10 * done // max(whole, 1)
        if tenths != said:
            said = tenths
            console.say(f"encoded {size(done)} of {size(whole)}")

    return told


# Looking


def _facts(found: store.Dataset) -> Rows:
    manifest = found.manifest
    rows: list[tuple[object, ...]] = [("tokenizer", f"{found.tokenizer.name}, {found.tokenizer.size:,} entries")]
    for part in build.PARTS:
        tokens, documents = manifest["tokens"][part], manifest["documents"][part]
        per = manifest["bytes"][part] / max(tokens, 1)
        rows.append((part, f"{documents:,} documents, {tokens:,} tokens, {per:.3f} bytes a token"))
    return [*rows, ("type of a token", manifest["dtype"]), ("checksum", found.fingerprint)]


def _show(
    tokens: np.ndarray, documents: megatron.Documents, tokenizer: Tokenizer | None, count: int, console: Console
) -> None:
    """The starts of some documents, decoded where there is a tokenizer."""
    for number in range(min(count, documents.count)):
        which = (2 * number + 1) * documents.count // (2 * min(count, documents.count))
        bounds = documents.start(np.array([which, min(which + 1, documents.count - 1)]))
        first = int(bounds[0])
        last = int(bounds[1]) if which + 1 < documents.count else len(tokens)
        ids = tokens[first : min(last, first + _SHOWN)]
        shown = tokenizer.decode(ids)[:_SHOWN] if tokenizer is not None else " ".join(map(str, ids[:50].tolist()))
        console.say(f"--- document {which:,}, {last - first:,} tokens\n{shown}")


def _digest(path: Path) -> str:
    """BLAKE2b of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
