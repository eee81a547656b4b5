"""How long a collective takes over one mesh axis: ring and tree terms over the slowest link that it crosses.

Devices are laid host by host, the last of AXES innermost, as sharding.mesh.build lays them. So the devices of an axis
lie `stride` apart, stride being the product of the axes inside of it, and a group may lie in one host, or have some
members in each of several. A ring through several hosts enters and leaves each once, while the other groups of the axis
do so as well: it has the network's share of as many devices as it has members in a host.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxgpt.planner.hardware import Hardware
from jaxgpt.sharding.rows import AXES


@dataclass(frozen=True)
class Group:
    """Devices that communicate with each other, and the link that bounds them."""

    size: int
    bandwidth: float
    """Bytes a second into each member, along a ring."""
    hosts: int
    """How many it spreads over."""
    inside: float
    """Seconds a message inside a host ..."""
    between: float
    """... and between hosts."""

    @property
    def _turn(self) -> float:
        """Latency of one turn of a ring: as long as its slowest link's."""
        return self.between if self.hosts > 1 else self.inside

    @property
    def _up_and_down(self) -> float:
        """Latency of a tree over the hosts, and of chains inside each."""
        members = -(-self.size // self.hosts)
        return math.ceil(math.log2(self.hosts)) * self.between + (members - 1) * self.inside

    def all_gather(self, nbytes: float | int) -> float:
        """Of nbytes in all: (p-1)/p of them arrive, in p-1 turns."""
        p = self.size
        return 0.0 if p == 1 else nbytes * (p - 1) / p / self.bandwidth + (p - 1) * self._turn

    reduce_scatter = all_gather

    def all_reduce(self, nbytes: float | int) -> float:
        """A ring, 2(p-1)/p of nbytes in 2(p-1) turns; or, where that is shorter, a tree: as many bytes as a ring at its
        best, up and down once."""
        p = self.size
        if p == 1:
            return 0.0
        ring = 2 * nbytes * (p - 1) / p / self.bandwidth + 2 * (p - 1) * self._turn
        tree = 2 * nbytes / self.bandwidth + 2 * self._up_and_down
        return min(ring, tree)

    def permute(self, nbytes: float | int) -> float:
        """A message to a neighbour."""
        return 0.0 if self.size == 1 else nbytes / self.bandwidth + self._turn


ALONE = Group(1, math.inf, 1, 0.0, 0.0)
"""A device without others."""


def group(hardware: Hardware, sizes: Mapping[str, int], axes: tuple[str, ...]) -> Group:
    """The devices along these axes together, which are neighbours in AXES or separated by axes that are whole.

    A group of axes that are not neighbours is taken to lie as its outermost does.
    """
    named = [axis for axis in AXES if axis in axes and sizes[axis] > 1]
    if not named:
        return ALONE
    size = math.prod(sizes[axis] for axis in named)
    innermost = named[-1]
    stride = math.prod(sizes[axis] for axis in AXES[AXES.index(innermost) + 1 :])
    return _laid(hardware, size, stride)


@functools.lru_cache(maxsize=10_000)
def _laid(hardware: Hardware, size: int, stride: int) -> Group:
    inside, between, reached = hardware.inside, hardware.between, hardware.efficiency
    members = min(size, max(1, hardware.host // stride))  # of a group, in one host
    hosts = -(-size // members)
    wires = _wires(hardware, members) if members > 1 else math.inf
    bandwidth = inside.bandwidth * reached.inside * wires
    if hosts > 1:
        bandwidth = min(bandwidth, members * between.bandwidth * reached.between)
    return Group(size, bandwidth, hosts, inside.latency, between.latency)


def _wires(hardware: Hardware, members: int) -> float:
    """Share of a device's links that lead to others of the group."""
    return (members - 1) / (hardware.host - 1) if hardware.pairwise and hardware.host > 1 else 1.0
