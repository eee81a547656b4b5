"""Tokenizers: bytes, characters, and whatever the tokenizers library can say (a BPE of our own, GPT-2's, others)."""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxgpt.errors import UserError, require

Ids: TypeAlias = Sequence[SupportsIndex] | np.ndarray

NAMES = ("bytes", "chars", "bpe")
ALLOWED = (
    f"{', '.join(NAMES)}, a tokenizer.json, or a folder with tokenizer.json or with GPT-2's encoder.json and vocab.bpe"
)
END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""What tokenizers call the end of a document."""
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_LIBRARY_FILE = "tokenizer.json"
"""The tokenizers library's own format, so that other tools can read it."""
_OWN_FILE = "jaxgpt_tokenizer.json"
_UNKNOWN = "\ufffd"
_LAST_WORD_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)
_SHORT = re.compile(r".{1,1024}(?<=\S)(?=[ \n])|.{1,1024}", re.DOTALL)
_SEARCHED = 2**16
"""Characters at a text's end that are searched for a place to divide it."""
_SMALLEST_BPE = 257
"""256 bytes and the end of text."""


class Tokenizer(ABC):
    """Text to token ids and back."""

    name: str
    size: int
    """Entries; ids are below it."""
    boundary: str = "\n\n"
    """Text put between two documents."""
    end: int | None = None
    """Id of the end of a document, where the vocabulary has one."""

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The text's tokens. Raises UserError where the vocabulary cannot spell it."""

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """The tokens' text. Ids outside the vocabulary and broken UTF-8 become U+FFFD."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what load_tokenizer reads into an existing folder."""

    def fingerprint(self) -> str:
        """A short string that determines what a text's tokens are."""
        return self.name

    def encode_many(self, texts: Sequence[str]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Each text's tokens; on all cores where the library can."""
        return map(self.encode, texts)

    def cut(self, text: str) -> int:
        """The last place before which the text's tokens do not depend on what follows; 0: none is known."""
        return len(text)


class BytesTokenizer(Tokenizer):
    """The bytes of UTF-8."""

    name = "bytes"
    size = 256

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        return _by_runs(ids, self.size, lambda known: bytes(known).decode("utf-8", "replace"))

    def save(self, folder: Path) -> None:
        _write_json(folder / _OWN_FILE, {"kind": self.name})


class CharsTokenizer(Tokenizer):
    """One token a character: the sorted characters of a text."""

    name = "chars"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.size = len(self.characters)
        self._points = _code_points(self.characters)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        points = _code_points(text)
        ids = np.minimum(np.searchsorted(self._points, points), self.size - 1)
        wrong = np.flatnonzero(self._points[ids] != points)
        if wrong.size:
            raise UserError(
                f"character {text[wrong[0]]!r} at {wrong[0]} is not among the {self.size} that the chars tokenizer "
                "was made from; leave it out, or train with --tokenizer bytes or bpe"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Ids) -> str:
        return _by_runs(ids, self.size, lambda known: "".join(self.characters[i] for i in known))

    def save(self, folder: Path) -> None:
        _write_json(folder / _OWN_FILE, {"kind": self.name, "characters": self.characters})


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library. Special tokens written out in a text are taken as such."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.no_truncation()
        library.no_padding()
        self.library = library
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        kind = json.loads(library.to_str())
        self.name = f"{kind['model']['type'].lower()}-{self.size}"
        special = {token["content"] for token in kind["added_tokens"] if token["special"]}
        end = next((text for text in _ENDS if text in special), None)
        if end is not None:
            self.boundary, self.end = end, vocabulary[end]
        # GPT-2's rule starts a new word at white space after anything else. Of other rules nothing is assumed.
        words = kind["pre_tokenizer"] or {}
        self._divisible = (
            words.get("type") == "ByteLevel"
            and words["use_regex"]
            and not words["add_prefix_space"]
            and not kind["normalizer"]
            and not any(" " in t["content"] or t["lstrip"] or t["rstrip"] for t in kind["added_tokens"])
        )

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        # A command line may hold bytes that are no UTF-8, which Python marks by surrogates.
        return next(self.encode_many([text.encode("utf-8", "replace").decode()]))

    def encode_many(self, texts: Sequence[str]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        batch = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return (np.array(encoding.ids, np.int32) for encoding in batch)

    def decode(self, ids: Ids) -> str:
        return _by_runs(ids, self.size, lambda known: self.library.decode(known, skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        (folder / _LIBRARY_FILE).write_text(self.library.to_str(pretty=True), encoding="utf-8")

    def fingerprint(self) -> str:
        return hashlib.blake2b(self.library.to_str().encode(), digest_size=16).hexdigest()

    def cut(self, text: str) -> int:
        start = max(len(text) - _SEARCHED, 0)
        last = _LAST_WORD_END.match(text, start) if self._divisible else None
        return last.end() if last else 0


def train_bpe(texts: Iterator[str], vocab: int) -> LibraryTokenizer:
    """A byte-level BPE with GPT-2's word rule, at most vocab entries and END_OF_TEXT as entry 0; the same each time."""
    require(
        vocab >= _SMALLEST_BPE,
        "--vocab",
        vocab,
        f"a bpe has at least {_SMALLEST_BPE} entries, the bytes and the end of text",
        "raise --vocab, or take --tokenizer bytes",
    )
    library = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(short_texts(texts), trainer)
    return LibraryTokenizer(library)


def short_texts(texts: Iterable[str]) -> Iterator[str]:
    """The texts in pieces of at most 1024 characters, each up to a word's end where there is one.

    Training takes time by the square of a word's length, and some texts are one word.
    """
    return chain.from_iterable(map(_SHORT.findall, texts))


def open_tokenizer(path: str) -> LibraryTokenizer:
    """The tokenizer at --tokenizer's path: a tokenizer.json, GPT-2's pair by either file, or a folder with one of them.

    Raises UserError where nothing is there, or what is there cannot be read.
    """
    place = Path(os.path.expanduser(path))
    if not os.path.exists(place):
        raise UserError(f"--tokenizer {path}: no such name or file; allowed are {ALLOWED}")
    if place.suffix == ".gguf":
        from jaxgpt.interop.gguf import GGUFFile  # which makes tokenizers of this module's kind

        found = GGUFFile(place).tokenizer()
        if found is None:
            raise UserError(f"--tokenizer {path}: no tokenizer in this file; allowed are {ALLOWED}")
        return found
    folder = os.path.isdir(place)
    if folder and os.path.exists(place / _LIBRARY_FILE):
        return _from_file(place / _LIBRARY_FILE)
    for pair in _GPT2_FILES:
        if any(os.path.exists(place / file) if folder else place.name == file for file in pair):
            encoder, merges = ((place if folder else place.parent) / file for file in pair)
            return _from_gpt2(encoder, merges)
    if folder:
        raise UserError(f"--tokenizer {path}: no tokenizer in this folder; allowed are {ALLOWED}")
    return _from_file(place)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that Tokenizer.save wrote. Raises UserError where there is none or it is damaged."""
    own = folder / _OWN_FILE
    if not own.exists():
        return _from_file(folder / _LIBRARY_FILE)
    fields = _read_json(own)
    characters = fields.get("characters")
    if fields.get("kind") == CharsTokenizer.name and isinstance(characters, str) and characters:
        return CharsTokenizer(characters)
    if fields != {"kind": BytesTokenizer.name}:
        raise UserError(f"{own}: not a tokenizer of jaxgpt; restore the file")
    return BytesTokenizer()


def check_size(tokenizer: Tokenizer, vocab: int) -> None:
    """Raises UserError unless every token is below vocab."""
    require(
        tokenizer.size <= vocab,
        "--vocab",
        vocab,
        f"tokenizer {tokenizer.name} has {tokenizer.size} entries",
        f"take --vocab {tokenizer.size} or more, or another --tokenizer",
    )


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _from_file(path: Path) -> LibraryTokenizer:
    content = _read(path)
    try:
        # from_buffer says ValueError where from_file says Exception.
        return LibraryTokenizer(tokenizers.Tokenizer.from_buffer(content))
    except ValueError as error:
        raise UserError(f"{path}: not a file of the tokenizers library ({error}); fetch it again") from None


def _from_gpt2(encoder: Path, merges: Path) -> LibraryTokenizer:
    """GPT-2's byte-level BPE: a JSON object of entries and ids, and one merge a line, the first line a version."""
    vocabulary = _read_json(encoder)
    ids = sorted(id for id in vocabulary.values() if isinstance(id, int))
    if ids != list(range(len(vocabulary))):
        raise UserError(f"{encoder}: not an encoder (ids must be 0 to the number of entries - 1); fetch it again")
    absent = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocabulary]
    if absent:
        raise UserError(f"{encoder}: no entry for {len(absent)} of the 256 bytes; fetch it again")
    content = _read(merges)
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{merges}: not UTF-8 at byte {error.start}; fetch it again") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise UserError(f"{merges}: line {number} is no merge of entries of {encoder.name}; fetch both again")
        pairs.append((left, right))
    library = _byte_level(models.BPE(vocab=vocabulary, merges=pairs))
    library.add_special_tokens([end for end in _ENDS if end in vocabulary])
    return LibraryTokenizer(library)


def _by_runs(ids: Ids, size: int, decode: Callable[[list[int]], str]) -> str:
    """Decodes runs of ids below size, with one U+FFFD for every other id."""
    runs = groupby(np.asarray(ids).ravel().tolist(), key=lambda id: 0 <= id < size)
    return "".join(decode(list(run)) if known else _UNKNOWN * len(list(run)) for known, run in runs)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); a tokenizer needs this file") from None


def _read_json(path: Path) -> dict[str, Any]:
    content = _read(path)
    try:
        fields = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); fetch or restore the file") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: not a JSON object; fetch or restore the file")
    return fields


def _write_json(path: Path, fields: dict[str, str]) -> None:
    path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
