"""What a run reads: one source or a blend of several, tokenized alike, as batches in an order.

The sample at a position of the run is a function of seed, blend and position alone. Each source has an order of its own
(see order.py), which it goes through as the blend asks for it; so a source that is in a blend goes on where it was when
the blend changes.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from jaxgpt.data import blend, build, loader, sources, store
from jaxgpt.data.blend import Part
from jaxgpt.data.build import Say
from jaxgpt.data.loader import Batch, Edges, strange
from jaxgpt.data.megatron import Documents
from jaxgpt.data.order import indices_at
from jaxgpt.data.store import Dataset
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer
from jaxgpt.data.workers import Workers
from jaxgpt.errors import UserError

_BLOCK = 4096
"""Positions of a source whose samples are computed at once: a few cost as much as many."""


@dataclass(eq=False)
class Mixture:
    """One or several corpora with one tokenizer."""

    data: str
    parts: tuple[Part, ...]
    datasets: tuple[Dataset, ...]
    since: int = 0
    """Position of the run at which this blend begins."""
    had: tuple[int, ...] = ()
    """Samples that were taken of each source before that."""
    seconds: list[float] = field(default_factory=list)
    """Spent on reading each source, so far."""
    _kept: dict[tuple[int, int, int, int], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.had = self.had or (0,) * len(self.parts)
        self.seconds = [0.0] * len(self.parts)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.datasets[0].tokenizer

    @property
    def weights(self) -> tuple[int, ...]:
        return tuple(part.weight for part in self.parts)

    @property
    def train_tokens(self) -> int:
        return sum(len(dataset.train) for dataset in self.datasets)

    @property
    def validation(self) -> list[np.ndarray]:
        """The validation tokens of each source."""
        return [dataset.validation for dataset in self.datasets]

    @property
    def validation_documents(self) -> list[Documents]:
        """Where documents begin in them."""
        return [dataset.validation_documents for dataset in self.datasets]

    @property
    def validation_bytes(self) -> int | None:
        """UTF-8 bytes that the validation tokens stand for, where it is known of all sources."""
        sizes = [dataset.validation_bytes for dataset in self.datasets if dataset.validation_bytes is not None]
        return sum(sizes) if len(sizes) == len(self.datasets) else None

    @property
    def manifest(self) -> dict[str, Any]:
        """What a run writes down of its data."""
        if len(self.parts) == 1:
            return self.datasets[0].manifest
        each = [
            {"weight": part.weight, **dataset.manifest} for part, dataset in zip(self.parts, self.datasets, strict=True)
        ]
        return {"source": self.describe(), "sources": each}

    @property
    def fingerprint(self) -> str:
        """Of the tokens, the tokenizer and the weights. One source's is the same in a blend of one."""
        if len(self.parts) == 1:
            return self.datasets[0].fingerprint
        each = sorted((found.fingerprint, part.weight) for part, found in zip(self.parts, self.datasets, strict=True))
        return hashlib.sha256(json.dumps(each).encode()).hexdigest()

    def describe(self) -> str:
        """One line for the console."""
        if len(self.parts) == 1:
            return str(self.datasets[0].manifest["source"])
        whole = sum(self.weights)
        return ", ".join(f"{part.weight / whole:.4g} of {part.data}" for part in self.parts)

    def check(self, seq: int) -> None:
        """Raises UserError unless each source has a sample of seq + 1 tokens to train on, and one to validate with."""
        for part, dataset in zip(self.parts, self.datasets, strict=True):
            dataset.check(seq, part.data if len(self.parts) > 1 else "")

    def samples(self, seq: int) -> list[int]:
        """Samples of an epoch of each source."""
        return [loader.samples_in(dataset.train, seq, "training part") for dataset in self.datasets]

    def taken(self, position: int) -> list[int]:
        """Samples of each source that come before a position at or after `since`."""
        return [
            before + count
            for before, count in zip(self.had, blend.counts(self.weights, position - self.since), strict=True)
        ]

    def beginning(self, since: int, taken: Mapping[str, int]) -> "Mixture":
        """The same sources, blended from a position on; taken: samples of each before that, by fingerprint."""
        had = tuple(taken.get(dataset.fingerprint, 0) for dataset in self.datasets)
        return Mixture(self.data, self.parts, self.datasets, since, had)

    def order(
        self, seq: int, seed: int, positions: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """(source, sample of its training part) at positions of the run."""
        return sample_order(self.weights, self.samples(seq), seed, positions - self.since, self.had)

    def batch(self, seq: int, seed: int, positions: Int64[np.ndarray, " n"], edges: Edges = "joined") -> Batch:
        """{"inputs", "targets"}, int32 [n, seq], of the samples at these positions of the run.

        A process may ask for any of them: what it gets does not depend on what else is asked for. With edges
        "separate" also {"starts"}, of the inputs: see loader.at_edges. A target is -1 where there is none. Raises
        UserError where stored tokens are outside of the vocabulary.
        """
        source, turn = blend.draw(self.weights, positions - self.since)
        tokens = np.empty((len(positions), seq + 1), np.int32)
        begins = None if edges == "joined" else np.zeros((len(positions), seq + 1), bool)
        for k, dataset in enumerate(self.datasets):
            began = time.perf_counter()
            rows = np.flatnonzero(source == k) if len(self.datasets) > 1 else np.arange(len(positions))
            starts = self._starts(k, seq, seed, self.had[k] + turn[rows])
            loader.copy_rows(dataset.train, starts, tokens, rows.tolist())
            if begins is not None:
                begins[rows] = loader.begins(dataset.documents, starts, seq + 1)
            if dataset.foreign:
                _refuse_strange(dataset, tokens, rows)
            self.seconds[k] += time.perf_counter() - began
        return loader.at_edges(tokens[:, :-1], tokens[:, 1:], begins, edges)

    def _starts(self, k: int, seq: int, seed: int, turns: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The first token of samples of a source, by its own turns, which are mostly neighbours."""
        blocks = turns // _BLOCK
        found = np.empty(len(turns), np.int64)
        for block in dict.fromkeys(blocks.tolist()):
            here = blocks == block
            found[here] = self._block(k, seq, seed, block)[turns[here] - block * _BLOCK]
        return found

    def _block(self, k: int, seq: int, seed: int, block: int) -> Int64[np.ndarray, " n"]:
        """The first tokens of _BLOCK turns, of which the last ones asked for are kept."""
        asked = k, seq, seed, block
        if asked not in self._kept:
            train = self.datasets[k].train
            turns = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
            if len(self._kept) >= 2 * len(self.parts):
                del self._kept[next(iter(self._kept))]
            samples = loader.samples_in(train, seq)
            self._kept[asked] = loader.sample_starts(len(train), samples, seq, seed, turns)
        return self._kept[asked]


def sample_order(
    weights: Sequence[int],
    samples: Sequence[int],
    seed: int,
    positions: Int64[np.ndarray, " n"],
    had: Sequence[int] | None = None,
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """(source, its sample) at each position of a blend of sources with so many samples; had: taken of each before."""
    source, turn = blend.draw(weights, positions)
    found = np.empty(len(positions), np.int64)
    for k, count in enumerate(samples):
        rows = np.flatnonzero(source == k)
        found[rows] = indices_at(seed, turn[rows] + (had[k] if had else 0), count)
    return source, found


def open_mixture(
    data: str,
    tokenizer: str | Tokenizer,
    vocab: int,
    validation: float,
    cache: Path | None = None,
    say: Say = lambda line: None,
) -> Mixture:
    """The source or blend that --data names; see blend.parse, and store.open_dataset for the rest.

    A tokenizer that is made from the data is made from the train parts of all sources, or is that of a prepared folder
    among them. Raises UserError as open_dataset does.
    """
    parts = blend.parse(data)
    if len(parts) > 1 and store.given_tokenizer(tokenizer) is None:
        tokenizer = _shared_tokenizer([part.data for part in parts], str(tokenizer), vocab, validation, cache, say)
    found = tuple(store.open_dataset(part.data, tokenizer, vocab, validation, cache, say) for part in parts)
    names: dict[str, str] = {}
    for part, dataset in zip(parts, found, strict=True):
        other = names.setdefault(dataset.fingerprint, part.data)
        if other != part.data:
            raise UserError(f"--data {data}: {other} and {part.data} hold the same tokens; name one, with both weights")
    return Mixture(data, parts, found)


def _shared_tokenizer(
    named: list[str], name: str, vocab: int, validation: float, cache: Path | None, say: Say
) -> Tokenizer:
    """One tokenizer for several sources, kept in the cache."""
    for data in named:
        if store.is_prepared(data):
            return store.open_prepared(data, name, vocab).tokenizer
    texts = [data for data in named if not store.is_megatron(data)]
    if len(texts) < len(named):
        raise UserError(
            f"--tokenizer {name}: cannot be made from Megatron's files; give the one that made their tokens"
        )
    found = []
    for data in texts:
        with Workers(store.processes(data)) as workers:
            found.append(sources.find_documents(data, workers.map))
    keys = sorted(build.Wanted(name, vocab, validation).key(source) for source in found)
    joined = hashlib.blake2b(json.dumps(keys).encode(), digest_size=16).hexdigest()
    folder = (cache or store.cache_folder()) / "tokenizers" / joined
    if not folder.exists():
        divided = [sources.split(source, validation) for source in found]
        train, held_out = ([span for pair in divided for span in pair[side]] for side in (0, 1))
        made, _ = build.made_tokenizer(name, train, held_out, vocab, say)
        store.keep_tokenizer(made, folder)
    return load_tokenizer(folder)


def _refuse_strange(dataset: Dataset, tokens: np.ndarray, rows: np.ndarray) -> None:
    """Tokens of files that others have made may be of another tokenizer."""
    size = dataset.tokenizer.size
    found = tokens if len(rows) == len(tokens) else tokens[rows]
    if (token := strange(found, size)) is not None:
        raise UserError(
            f"--data {dataset.manifest['source']}: token {token} is outside of the {size:,} entries of tokenizer "
            f"{dataset.tokenizer.name}; give --tokenizer the one that made these files"
        )


def validation_batches(
    parts: Sequence[np.ndarray],
    seq: int,
    batch: int,
    limit_tokens: int | None = None,
    stride: int | None = None,
    documents: Sequence[Documents] | None = None,
    edges: Edges = "joined",
) -> Iterator[Batch]:
    """loader.validation_batches of each part in turn; the limit is shared out by their tokens."""
    whole = sum(map(len, parts))
    for number, part in enumerate(parts):
        limit = None if limit_tokens is None else max(1, limit_tokens * len(part) // whole)
        known = None if documents is None else documents[number]
        yield from loader.validation_batches(part, seq, batch, limit, stride, known, edges)
