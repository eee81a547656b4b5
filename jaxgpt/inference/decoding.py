"""Texts that are being written: their cache, filled from prompts, and one token more of each at a time."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from jaxgpt.inference.decoder import Cache, Decoder

CHUNK = 64
"""Tokens of a prompt that are read at once; of prompts that are all short, half as many."""


@runtime_checkable
class Writing(Protocol):
    """What generation needs of a model."""

    @property
    def left(self) -> int: ...

    def start(self, texts: Sequence[Sequence[int]], room: int) -> Float[np.ndarray, "B V"]: ...

    def next(self, tokens: Sequence[int]) -> Float[np.ndarray, "B V"]: ...


@runtime_checkable
class Ahead(Writing, Protocol):
    """What can choose the likeliest token by itself, where the model is."""

    def likeliest(self, rounds: int) -> Iterator[list[int]]: ...


def enough(slots: int) -> int:
    """Slots of a cache with room for so many: a power of two, or three quarters of one. Every token reads the whole
    cache, and every size is compiled: less than half as much again is read in vain, of two sizes an octave."""
    whole = 1 << (slots - 1).bit_length()
    return whole * 3 // 4 if slots <= whole * 3 // 4 else whole


class Decoding:
    """A batch of texts on a mesh. Two programs run, one for a chunk of the prompts and one for a token, for all lengths
    that the same cache has room for."""

    def __init__(self, decoder: Decoder, params: dict[str, jax.Array]) -> None:
        self._decoder = decoder
        self._weights = decoder.prepare(params)
        self._cache: Cache = []
        self._shape = (0, 0)
        self._starts: Any = None
        self._slot = 0
        self._count = 0
        self._logits: Any = None

    @property
    def left(self) -> int:
        """Tokens that can still be read."""
        return self._shape[1] - self._slot

    def start(self, texts: Sequence[Sequence[int]], room: int) -> Float[np.ndarray, "B V"]:
        """Reads texts, each of at least one token and at most the context, in the place of those before.

        room: tokens that the longest of them will get at most. Returns logits of what follows each text.
        """
        model = self._decoder.model
        self._count = len(texts)
        longest = max(map(len, texts))
        chunk = CHUNK if longest > CHUNK // 2 else CHUNK // 2
        filled = -(-longest // chunk) * chunk
        rows = -(-self._count // self._decoder.rows) * self._decoder.rows
        self._make_room(rows, min(filled + room, -(-model.seq // CHUNK) * CHUNK + CHUNK))
        tokens = np.zeros((rows, filled), np.int32)
        starts = np.full(rows, filled - 1, np.int32)
        for row, text in enumerate(texts):
            tokens[row, filled - len(text) :] = text
            starts[row] = filled - len(text)
        self._starts, self._slot = self._decoder.place(starts), 0
        for first in range(0, filled, chunk):
            self._logits = self._read(tokens[:, first : first + chunk])
        return self._on_host(self._logits)

    def next(self, tokens: Sequence[int]) -> Float[np.ndarray, "B V"]:
        """Reads one more token of each text. Returns logits of what follows it."""
        padded = np.zeros((self._shape[0], 1), np.int32)
        padded[: self._count, 0] = tokens
        return self._on_host(self._read(padded))

    def likeliest(self, rounds: int) -> Iterator[list[int]]:
        """The likeliest next token of each text, round by round, and read in its turn; at most `rounds` of them, and no
        more than there are slots. To be asked for after start. The host handles a round while the next one is made."""
        ahead: jax.Array | None = self._decoder.likeliest(self._logits)
        while ahead is not None:
            now, ahead, rounds = ahead, None, rounds - 1
            if rounds and self.left:
                slot = np.int32(self._slot)
                ahead, self._cache = self._decoder.follow(self._weights, self._cache, now, slot, self._starts)
                self._slot += 1
            yield np.asarray(now)[: self._count, 0].tolist()

    def _make_room(self, rows: int, slots: int) -> None:
        """A cache of so many slots at least."""
        if self._shape[0] == rows and self._shape[1] >= slots:
            return
        self._shape = (rows, enough(slots))
        self._cache = []
        self._cache = self._decoder.new_cache(*self._shape)

    def _read(self, tokens: np.ndarray) -> jax.Array:
        slot = np.int32(self._slot)
        placed = self._decoder.place(tokens)
        logits, self._cache = self._decoder.extend(self._weights, self._cache, placed, slot, self._starts)
        self._slot += tokens.shape[1]
        return logits

    def _on_host(self, logits: jax.Array) -> np.ndarray:
        return np.asarray(logits)[: self._count, : self._decoder.model.vocab]
