"""Batches from stored tokens, for training in the order of samples and for validation in the order of the text."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from jaxgpt.data.megatron import Documents
from jaxgpt.data.order import epoch_shifts, indices_at
from jaxgpt.errors import UserError

NO_TARGET = -1
"""The target where there is nothing to predict."""

Batch = dict[str, np.ndarray]
Edges = Literal["joined", "masked", "separate"]
"""What becomes of the places where a document ends inside of a row: nothing; the first token of the next one is no
target; that, and it is told of each token where its document begins."""

T = TypeVar("T")


def strange(tokens: Int32[np.ndarray, "..."], size: int) -> int | None:
    """The first of the tokens that a vocabulary of that size lacks; None where it has them all."""
    if not tokens.size or tokens.view(np.uint32).max() < size:  # what is below 0 is above all there
        return None
    return int(tokens[(tokens < 0) | (tokens >= size)][0])


def samples_in(tokens: Integer[np.ndarray, " tokens"], seq: int, part: str = "text") -> int:
    """Samples of an epoch: of seq + 1 tokens, neighbours sharing one, and room to begin each epoch elsewhere.

    Raises UserError, naming the part, where there is none.
    """
    if len(tokens) < seq + 1:
        raise UserError(
            f"the {part} has {len(tokens)} tokens, fewer than the {seq + 1} of one sample; "
            "take more --data, a smaller --seq, or another --validation"
        )
    return max(1, len(tokens) // seq - 1)


def training_batch(
    tokens: Integer[np.ndarray, " tokens"], seq: int, seed: int, first: int, count: int
) -> Int32[np.ndarray, "{count} {seq}+1"]:
    """The samples at positions first .. first + count - 1 of the seed's order: inputs [:, :-1], targets [:, 1:].

    A function of tokens, seed and positions alone: any division of the positions into batches, or among processes,
    gives the same samples. Each epoch begins fewer than seq tokens into the text, at a place of its own, so that a
    token is not met at the same position of the context every time. Raises UserError where the text is shorter than
    one sample.
    """
    starts = sample_starts(len(tokens), samples_in(tokens, seq), seq, seed, np.arange(first, first + count))
    found = np.empty((count, seq + 1), np.int32)
    copy_rows(tokens, starts, found, range(count))
    return found


def sample_starts(
    tokens: int, samples: int, seq: int, seed: int, positions: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, " n"]:
    """The first token of the sample at each of these positions of the order."""
    starts = indices_at(seed, positions, samples) * seq
    return starts + epoch_shifts(seed, positions, samples, min(seq, tokens - samples * seq))


def copy_rows(tokens: np.ndarray, starts: Int64[np.ndarray, " n"], found: np.ndarray, rows: Iterable[int]) -> None:
    """found[row] = the tokens from starts[i] on, for each i and row in turn."""
    length = found.shape[1]
    tokens = np.asarray(tokens)  # slices of a memmap are memmaps, at ten times the cost
    for row, start in zip(rows, starts.tolist(), strict=True):
        found[row] = tokens[start : start + length]


def begins(documents: Documents, starts: Int64[np.ndarray, " n"], length: int) -> Bool[np.ndarray, "n {length}"]:
    """Whether a document begins at each place of the `length` tokens from each start on; not at the first, whose
    document may have begun before."""
    found = np.zeros((len(starts), length), bool)
    rows, places = documents.between(starts, starts + length - 1)
    found[rows, places - starts[rows]] = True
    return found


def starts(begins: Bool[np.ndarray, "n length"]) -> Int32[np.ndarray, "n length"]:
    """The place in its row at which the document of each token begins, of rows in which documents begin at these
    places: 0 for one that began before. Tokens of one document have the same, and no others."""
    places = np.arange(begins.shape[1], dtype=np.int32)
    return np.maximum.accumulate(np.where(begins, places, np.int32(0)), axis=1)


def at_edges(
    inputs: Int32[np.ndarray, "n seq"],
    targets: Int32[np.ndarray, "n seq"],
    begins: Bool[np.ndarray, "n seq+1"] | None,
    edges: Edges,
) -> Batch:
    """{"inputs", "targets"} as edges says, with "separate" also {"starts"} of the inputs.

    begins: whether a document begins at each input and at the token after the last; None where edges are "joined".
    """
    found = {"inputs": inputs, "targets": targets}
    if begins is not None and edges != "joined":
        found["targets"] = np.where(begins[:, 1:], np.int32(NO_TARGET), targets)
        if edges == "separate":
            found["starts"] = starts(begins[:, :-1])
    return found


def validation_batches(
    tokens: Integer[np.ndarray, " tokens"],
    seq: int,
    batch: int,
    limit_tokens: int | None = None,
    stride: int | None = None,
    documents: Documents | None = None,
    edges: Edges = "joined",
) -> Iterator[Batch]:
    """{"inputs", "targets"}, int32 [batch, seq], in which each token but the first is a target once; targets are -1
    where there is none. With edges that are not "joined", the first token of a document is none, and batches are as
    at_edges has them; documents says where these begin.

    The last row and the last batch are filled up, so that a sum over the targets that are not -1, divided by their
    number, is the exact mean. limit_tokens: at most so many targets, in rows spread evenly over the text, the same
    ones each time; but never less than one row. stride: tokens between the starts of two rows, which then overlap, so
    that each target has seq - stride tokens before it in its row, or all that there are. None: seq, no overlap. Raises
    UserError where nothing can be predicted.
    """
    if len(tokens) < 2:
        raise UserError(f"the text has {len(tokens)} tokens, and a prediction needs 2; take more --data")
    step = stride or seq
    rows = 1 + -(-max(0, len(tokens) - 1 - seq) // step)
    taken = rows if limit_tokens is None else min(rows, max(1, limit_tokens // seq))
    # The middle of each of `taken` equal stretches.
    chosen = (2 * np.arange(taken) + 1) * rows // (2 * taken)
    known = documents if edges != "joined" else None
    taken_rows = (chosen[at : at + batch] for at in range(0, taken, batch))
    return (_rows(tokens, seq, step, each, batch, known, edges) for each in taken_rows)


def _rows(
    tokens: np.ndarray, seq: int, step: int, rows: np.ndarray, batch: int, documents: Documents | None, edges: Edges
) -> Batch:
    inputs = np.zeros((batch, seq), np.int32)
    targets = np.full((batch, seq), NO_TARGET, np.int32)
    for row, index in enumerate(rows.tolist()):
        sample = tokens[index * step : index * step + seq + 1]
        known = seq - step if index else 0  # what the row before has predicted
        inputs[row, : len(sample) - 1] = sample[:-1]
        targets[row, known : len(sample) - 1] = sample[known + 1 :]
    edge = np.zeros((batch, seq + 1), bool)
    if documents is not None:
        edge[: len(rows)] = begins(documents, rows * step, seq + 1)
    return at_edges(inputs, targets, edge, edges)


class Prefetcher(Generic[T]):
    """Iterates over fetch(first) .. fetch(stop - 1), fetched ahead of their use by one thread.

        with Prefetcher(lambda step: training_batch(...), first, stop) as batches:
            for batch in batches: ...

    What fetch raises is raised to the consumer in its turn, and ends the iteration. The thread only ever runs what
    was asked for, at most `ahead` calls, so that neither an error in the consumer nor the interpreter's end waits
    for more.
    """

    def __init__(self, fetch: Callable[[int], T], first: int, stop: int, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, not {ahead}")
        self._fetch = fetch
        self._steps = iter(range(first, stop))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._futures: deque[Future[T]] = deque()
        self.waited = 0.0
        """Seconds that the consumer has waited."""
        for _ in range(ahead):
            self._ask()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        if not self._futures:
            self.close()
            raise StopIteration
        future = self._futures[0]
        # Waits; an interrupt here leaves the queue as it was.
        began = time.monotonic()
        failed = future.exception() is not None
        self.waited += time.monotonic() - began
        self._futures.popleft()
        if failed:
            self.close()
        self._ask()
        return future.result()

    def close(self) -> None:
        """Fetches no more; what is being fetched is dropped."""
        self._steps = iter(range(0))
        self._futures.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._futures.append(self._pool.submit(self._fetch, step))
