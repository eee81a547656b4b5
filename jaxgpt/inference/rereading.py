"""Texts that are written without a cache: for each token all of the text is read again.

What a user's own attention makes of earlier tokens is not known, so nothing of them is kept.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float

from jaxgpt.config import ModelConfig


class Rereading:
    """A batch of texts, read as a whole each time by one program."""

    left = 1
    """There is room for one more token always: a text that is too long loses its beginning."""

    def __init__(self, logits: Callable[[np.ndarray], jax.Array], model: ModelConfig) -> None:
        """logits: of tokens [B, S], whole."""
        self._logits, self._model = logits, model
        self._texts: list[list[int]] = []

    def start(self, texts: Sequence[Sequence[int]], room: int) -> Float[np.ndarray, "B V"]:
        """Logits of what follows each text."""
        self._texts = [list(text) for text in texts]
        return self._read()

    def next(self, tokens: Sequence[int]) -> Float[np.ndarray, "B V"]:
        """Logits after one more token of each text."""
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        return self._read()

    def _read(self) -> np.ndarray:
        """What lies to the right of a text's last token cannot change its logits."""
        seen = [text[-self._model.seq :] for text in self._texts]
        tokens = np.zeros((len(seen), self._model.seq), np.int32)
        for row, text in zip(tokens, seen, strict=True):
            row[: len(text)] = text
        last = np.array([len(text) - 1 for text in seen])
        return np.asarray(self._logits(tokens)[np.arange(len(seen)), last, : self._model.vocab])
