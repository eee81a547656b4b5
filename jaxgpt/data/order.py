"""The order of samples: a function of the seed and the position alone, for any number of samples, without memory.

Position i belongs to epoch i // samples. Each epoch is a permutation of its own, computed at the positions asked
for: a keyed bijection (a Feistel network over Z_a x Z_b with a * b just above the number of samples, as Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002), stepped again where it leaves the range (cycle walking).
"""

import math

import numpy as np
from jaxtyping import Int64

# Eight suffice for many samples; permutations of five are equally likely only with twelve.
_ROUNDS = 12
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64


def sample_indices(seed: int, first: int, count: int, samples: int) -> Int64[np.ndarray, " count"]:
    """The samples at positions first .. first + count - 1 of the order; see indices_at."""
    if not (first >= 0 and count >= 0 and first + count < 2**63):
        raise ValueError(f"no order for first {first}, count {count}")
    return indices_at(seed, np.arange(first, first + count), samples)


def indices_at(seed: int, positions: Int64[np.ndarray, " n"], samples: int) -> Int64[np.ndarray, " n"]:
    """The samples at these positions of the order.

    seed: at least 0 and below 2**64. samples: how many there are; every epoch of that many positions holds each of
    0 .. samples - 1 once. Raises ValueError where an argument is out of range.
    """
    if not (0 <= seed < _WORD and samples >= 1 and (positions >= 0).all()):
        raise ValueError(f"no order for seed {seed}, samples {samples}, positions {positions}")
    epoch, place = np.divmod(positions.astype(np.uint64), np.uint64(samples))
    key = _mix(epoch + _mix(np.array([seed], np.uint64)))
    index = _step(place, key, samples)
    while (outside := np.flatnonzero(index >= samples)).size:
        index[outside] = _step(index[outside], key[outside], samples)
    return index.astype(np.int64)


def epoch_shifts(seed: int, positions: Int64[np.ndarray, " n"], samples: int, shifts: int) -> Int64[np.ndarray, " n"]:
    """For each position of indices_at a number below `shifts` that its epoch draws."""
    epoch = positions.astype(np.uint64) // np.uint64(samples)
    return (_mix(epoch + _mix(np.array([seed ^ _GOLDEN], np.uint64))) % np.uint64(shifts)).astype(np.int64)


def _step(place: np.ndarray, key: np.ndarray, samples: int) -> np.ndarray:
    """A permutation of 0 .. a * b - 1, another one for each key; a * b - samples is below a, the root of samples."""
    a = math.isqrt(samples - 1) + 1
    b = -(-samples // a)
    left, right = np.divmod(place, np.uint64(b))
    for turn in range(0, _ROUNDS, 2):
        # Half of the hash, so that the sum cannot wrap around: that would not be a bijection.
        left = (left + (_mix(right + (key ^ _word(turn))) >> 1)) % a
        right = (right + (_mix(left + (key ^ _word(turn + 1))) >> 1)) % b
    return left * np.uint64(b) + right


def _word(turn: int) -> int:
    return (turn + 1) * _GOLDEN % _WORD


def _mix(x: np.ndarray) -> np.ndarray:
    """A hash of 64-bit words (the finaliser of SplitMix64; Steele, Lea and Flood, 2014)."""
    x = x ^ (x >> 30)
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x
