"""How long a device takes for one piece of work: products by a roofline, attention, passes over memory.

Seconds on one device. A product's efficiency depends on its shape: the tiles that it is cut into are dealt out to the
multiprocessors in waves, the last of which is seldom full; small tiles read more for what they compute; and while a
tile is written nothing is computed, which a short inner dimension does not make up for.
"""

import functools
import math
from dataclasses import dataclass

from jaxgpt.planner.hardware import Dtype, Hardware

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Rows and columns of the results that a multiprocessor makes at once: those that vendors' libraries choose among."""
REUSE = 10.0
"""Elements read for which a tile's products wait: the smaller the tile, the larger the share a b / (a + b) to it."""
HEAD = 128
"""Width of a head at which the fused attention reaches its efficiency."""
NARROW = 32
"""How much a narrower head loses: width / (width + NARROW)."""


@dataclass(frozen=True)
class Kernels:
    """Of one kind of device, in one type of computation."""

    hardware: Hardware
    dtype: Dtype

    @functools.cached_property
    def bytes(self) -> int:
        """Of an element."""
        return 2 if self.dtype == "bf16" else 4

    @functools.cached_property
    def _reached(self) -> float:
        """FLOP/s of a large product."""
        return self.hardware.peak(self.dtype) * self.hardware.efficiency.products

    @functools.cached_property
    def _bandwidth(self) -> float:
        return self.hardware.bandwidth * self.hardware.efficiency.memory

    def passes(self, nbytes: float | int) -> float:
        """Reading and writing so many bytes."""
        return nbytes / self._bandwidth

    def product(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """batch products of [m, k] and [k, n]: computing and then writing; or, where that is longer, reading and
        writing all three once."""
        computing = 2.0 * batch * m * n * k / (self._reached * shape_efficiency(self.hardware.units, m, n, batch))
        read, written = self.bytes * batch * (m * k + k * n), self.bytes * batch * m * n
        return max(computing, self.passes(read)) + self.passes(written)

    def attention(self, flops: float, head: int) -> float:
        """The fused kernel: FLOPs that it computes, and the width of a head."""
        narrow = head / (head + NARROW) * (HEAD + NARROW) / HEAD
        return flops / (self.hardware.peak(self.dtype) * self.hardware.efficiency.attention * min(1.0, narrow))


@functools.lru_cache(maxsize=100_000)
def shape_efficiency(units: int, m: int, n: int, batch: int = 1) -> float:
    """Share of a large product's speed that one of this shape reaches: the best of the tiles, at most 1.

    For tiles of a x b on u multiprocessors: m n / (waves u a b), with waves the ceiling of (tiles / u); times the
    tile's own efficiency.
    """
    best = 0.0
    largest = _reuse(*TILES[0])
    for a, b in TILES:
        tiles = batch * math.ceil(m / a) * math.ceil(n / b)
        filled = batch * m * n / (math.ceil(tiles / units) * units * a * b)
        best = max(best, filled * _reuse(a, b) / largest)
    return best


def _reuse(a: int, b: int) -> float:
    share = a * b / (a + b)
    return share / (share + REUSE)
