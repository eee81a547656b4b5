"""Which token comes next: on the host, from logits in fp32, so that no mesh and no batch changes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real

import numpy as np
from jaxtyping import Float

from jaxgpt.errors import require


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. In this order: repetition penalty, temperature, top-k, top-p."""

    temperature: float | int = 0.8
    """0: always the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens may be drawn; 0: all."""
    top_p: float | int = 1.0
    """Only the likeliest tokens that together have this share of the probability (arXiv 1904.09751)."""
    repetition_penalty: float | int = 1.0
    """Scores of tokens that the text has already are divided by this, negative ones multiplied (arXiv 1909.05858)."""
    seed: int = 0
    """The same seed draws the same tokens."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, whole = getattr(self, field.name), field.type is int
            good = isinstance(value, Integral if whole else Real)
            require(good, f"--{field.name.replace('_', '-')}", value, f"must be a {'whole ' if whole else ''}number")
        t, p = self.temperature, self.repetition_penalty
        warm = t == 0 or 1e-3 <= t < math.inf
        require(warm, "--temperature", t, "must be 0, for the likeliest token, or at least 0.001")
        require(self.top_k >= 0, "--top-k", self.top_k, "must be at least 1, or 0 for all tokens")
        require(0 < self.top_p <= 1, "--top-p", self.top_p, "must be above 0 and at most 1")
        require(0 < p < math.inf, "--repetition-penalty", p, "must be above 0 and finite")
        require(0 <= self.seed < 2**64, "--seed", self.seed, "must be at least 0 and below 2**64")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, whatever the text."""
        return self.temperature == 0 and self.repetition_penalty == 1

    def choose(self, scores: Float[np.ndarray, " V"], text: Sequence[int], row: int, count: int) -> int:
        """The next token of a text. row, count: which text of the batch, and how many tokens have been written of it:
        the noise is a function of these and of the seed."""
        if self.repetition_penalty != 1:
            scores, seen = scores.copy(), np.unique(np.asarray(text, np.int64))
            of_seen, penalty = scores[seen], np.float32(self.repetition_penalty)
            scores[seen] = np.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
        if self.temperature == 0:
            return int(scores.argmax())
        kept = self._kept(scores / np.float32(self.temperature))
        # the Gumbel trick: the softmax's distribution, without its sum
        noise = np.random.default_rng((self.seed, row, count)).gumbel(size=scores.shape)
        return int((kept + noise).argmax())

    def _kept(self, scores: np.ndarray) -> np.ndarray:
        """Scores, -inf where top-k or top-p leave a token out."""
        if 0 < self.top_k < len(scores):
            least = np.partition(scores, -self.top_k)[-self.top_k]
            scores = np.where(scores < least, -np.inf, scores)
        if self.top_p < 1:
            candidates = np.flatnonzero(scores > -np.inf)
            order = candidates[np.argsort(-scores[candidates], kind="stable")]
            powers = np.exp(scores[order].astype(np.float64) - scores[order[0]])
            shares = powers / powers.sum()
            left_out = order[np.cumsum(shares) - shares >= self.top_p]
            scores = scores.copy()
            scores[left_out] = -np.inf
        return scores
