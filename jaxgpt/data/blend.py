"""Blends: what --data names, with weights, and which source each position of the order takes.

A blend is periodic. Its weights are whole numbers w in lowest terms, and in every period of sum(w) positions source k
has w[k]. Within a period the sources take turns by Tijdeman's rule ("The chairman assignment problem", 1980), so that
after any number n of positions each source has had n w[k] / sum(w), to less than one sample. A position costs one
look-up, whatever it is.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from jaxgpt.errors import UserError, require

MOST = 100_000
"""Longest period: positions after which a blend repeats."""
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_WEIGHTED = re.compile(rf"(?:^|,)\s*({_NUMBER}):")


@dataclass(frozen=True)
class Part:
    """One source of a blend."""

    weight: int
    """In lowest terms, so that a part of one source alone has 1."""
    data: str
    """What find_documents takes."""


def is_blend(data: str) -> bool:
    """Whether --data gives weights. A file that is named like a blend is that file."""
    return not os.path.exists(os.path.expanduser(data)) and _WEIGHTED.match(data) is not None


def parse(data: str) -> tuple[Part, ...]:
    """The sources of --data: one without a weight, or "0.7:a.jsonl,0.3:b/", each with its own, in any unit.

    Raises UserError for a weight of 0, a source named twice or not at all, and weights whose period is too long.
    """
    if not is_blend(data):
        return (Part(1, data),)
    _, *found = _WEIGHTED.split(data)
    texts, names = found[::2], [name.strip() for name in found[1::2]]
    given = [Fraction(text) for text in texts]
    for text, weight, name in zip(texts, given, names, strict=True):
        require(weight > 0, "--data", data, f"the weight {text} of {name} must be above 0", "leave the source out")
        require(bool(name), "--data", data, f"weight {text} has no source", 'write it as "0.7:a.jsonl,0.3:b/"')
        require(names.count(name) == 1, "--data", data, f"{name} is named twice", "add its weights")
    scale = math.lcm(*(weight.denominator for weight in given))
    whole = [int(weight * scale) for weight in given]
    least = [weight // math.gcd(*whole) for weight in whole]
    if sum(least) > MOST:
        raise UserError(
            f"--data {data}: its weights repeat only after {sum(least):,} samples, and {MOST:,} are allowed; "
            "give weights of fewer digits, such as per cent"
        )
    return tuple(Part(weight, name) for weight, name in zip(least, names, strict=True))


def spell(parts: Sequence[Part]) -> str:
    """What parse reads."""
    return ",".join(f"{part.weight}:{part.data}" for part in parts)


@lru_cache(maxsize=8)
def turns(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(source, how many of its turns came before) of each position of a period."""
    period, kinds = sum(weights), len(weights)
    source, before = np.zeros(period, np.int16), np.zeros(period, np.int64)
    if kinds == 1:
        return source, np.arange(period)
    had = [0] * kinds
    unit = 2 * kinds - 2
    for place in range(period):
        chosen, deadline = -1, 0
        for k, weight in enumerate(weights):
            # Those that are at least 1 / unit behind; of these the one that may wait the least.
            if (weight * (place + 1) - had[k] * period) * unit >= period:
                mine = (had[k] + 1) * unit - 1
                if chosen < 0 or mine * weights[chosen] < deadline * weight:
                    chosen, deadline = k, mine
        source[place], before[place] = chosen, had[chosen]
        had[chosen] += 1
    return source, before


def draw(
    weights: Sequence[int], positions: Int64[np.ndarray, " n"]
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """For each position the source that it takes, and how many samples of that source came before it."""
    source, before = turns(tuple(weights))
    period, place = np.divmod(positions, len(source))
    chosen = source[place].astype(np.int64)
    return chosen, period * np.array(weights, np.int64)[chosen] + before[place]


def counts(weights: Sequence[int], positions: int) -> list[int]:
    """How many of the first `positions` positions each source takes."""
    source, _ = turns(tuple(weights))
    periods, rest = divmod(positions, len(source))
    begun = np.bincount(source[:rest], minlength=len(weights))
    return [periods * weight + int(more) for weight, more in zip(weights, begun, strict=True)]
