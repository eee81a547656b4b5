"""Text from a model: one token after another, the same on every mesh for the same seed."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

Logits = Callable[[Int[np.ndarray, "B S"], Int[np.ndarray, " B"]], Float[np.ndarray, "B V"]]
"""(tokens, index of each row's last token) -> logits of the next one."""


def generate(
    next_logits: Logits,
    prompts: Sequence[Sequence[int]],
    seq: int,
    max_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[list[int]]:
    """max_tokens more tokens for each prompt.

    The model sees the last `seq` tokens, in a buffer of one shape, so that nothing is compiled twice: what lies to
    the right of a token cannot change its logits. Temperature 0 takes the likeliest token. The noise of a token is a
    function of seed, row and position, so that neither mesh nor batch changes it.
    """
    rows = [list(prompt) for prompt in prompts]
    starts = [len(row) for row in rows]
    for count in range(max_tokens):
        seen = [row[-seq:] for row in rows]
        tokens = np.zeros((len(rows), seq), np.int32)
        for buffer, row in zip(tokens, seen, strict=True):
            buffer[: len(row)] = row
        logits = next_logits(tokens, np.array([len(row) - 1 for row in seen], np.int32))
        for index, (row, scores) in enumerate(zip(rows, logits, strict=True)):
            row.append(_choose(scores, temperature, (seed, index, count)))
    return [row[start:] for row, start in zip(rows, starts, strict=True)]


def _choose(scores: Float[np.ndarray, " V"], temperature: float, place: tuple[int, ...]) -> int:
    """One token by the Gumbel trick: the softmax's distribution, without its sum."""
    if temperature == 0:
        return int(scores.argmax())
    noise = np.random.default_rng(place).gumbel(size=scores.shape)
    return int((scores / temperature + noise).argmax())
