"""Which plans there are: every mesh and every choice on it that train would take, by train's own checks.

    space = Space(config, devices=1024, hardware="a100-80gb", free=frozenset(FREE))
    for sizes in space.meshes():
        for plan in space.plans(sizes): ...

What is not free is as the configuration says. Some legal plans are left out, each because another one is never worse:

- sequence parallelism without `tensor`, and ZeRO without `data`, which change nothing;
- GPipe, which takes as long as 1F1B and holds no fewer microbatches (pipeline.schedule);
- virtual stages beyond the fewest that make the longest part so short: they add messages and held microbatches alone.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxgpt.config import RunConfig
from jaxgpt.errors import UserError
from jaxgpt.pipeline.microbatches import micro_batch
from jaxgpt.pipeline.placement import place
from jaxgpt.planner.plan import Plan
from jaxgpt.recomputation import KINDS, counted
from jaxgpt.sharding import mesh
from jaxgpt.sharding.mesh import Sizes

FREE = ("mesh", "micro_batch", "schedule", "virtual_stages", "zero", "recompute", "sequence_parallel", "offload")
"""What a search may choose, by the names that the flags have. Offload it chooses for all plans at once: a space has
that of its configuration."""

Order = tuple[str, int]
"""A schedule and its virtual stages."""
Split = tuple[int, bool, str]
"""A stage of ZeRO, whether the sequence lies over `tensor`, and what lies in the host's memory."""


@dataclass(frozen=True)
class Space:
    """The plans of a configuration on so many devices of one kind."""

    config: RunConfig
    devices: int
    hardware: str
    free: frozenset[str]
    """Names of FREE that are to be chosen; the others are the configuration's."""

    def meshes(self) -> Iterator[Sizes]:
        """The meshes on which some plan is legal, in a fixed order."""
        if "mesh" in self.free:
            found = mesh.factorisations(self.devices)
        else:
            found = [mesh.parse(self.config.mesh, self.devices)]
        return (sizes for sizes in found if self.splits(sizes) and any(self.orders(sizes)))

    def plans(self, sizes: Sizes) -> Iterator[Plan]:
        """The legal plans on a mesh, in a fixed order, and of those alike but for recomputation less of it first."""
        splits = self.splits(sizes)
        for order, count in self.orders(sizes):
            again = self.recomputations(sizes["pipe"], order)
            for split in splits:
                for recompute in again:
                    yield self.plan(sizes, order, count, split, recompute)

    def plan(self, sizes: Sizes, order: Order, micro: int, split: Split, recompute: str) -> Plan:
        """One of them."""
        name, chunks = order
        chosen: dict[str, Any] = {**sizes, "schedule": name, "recompute": recompute}
        chosen |= {"zero": split[0], "offload": split[2]}
        return Plan(
            **chosen,
            micro_batch=micro,
            virtual_stages=chunks,
            stages=self.config.stages,
            sequence_parallel=split[1],
            context_attention=self._context_attention(sizes),
            hardware=self.hardware,
        )

    def recomputations(self, stages: int, order: Order) -> list[str]:
        """What may be computed again: nothing, and of either kind by so many layers of each part as there are."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self.ladders(stages, order))))

    def ladders(self, stages: int, order: Order) -> tuple[tuple[str, ...], ...]:
        """The same, for each kind from less of it to more."""
        if "recompute" not in self.free:
            return ((self.config.recompute,),)
        return _ladders(Plan(pipe=stages, virtual_stages=order[1], stages=self.config.stages).longest(self._layers))

    @property
    def _layers(self) -> int:
        return self.config.model.layers

    def splits(self, sizes: Sizes) -> list[Split]:
        """Stages of ZeRO and sequence parallelism that the mesh allows with any schedule; offload as configured."""
        zeros = [self.config.zero]
        if "zero" in self.free:
            zeros = [0, 1, 2, 3] if sizes["data"] > 1 else [0]
        sequences = [self.config.sequence_parallel]
        if "sequence_parallel" in self.free:
            sequences = [False, True] if sizes["tensor"] > 1 else [False]
        # All stages of ZeRO but 0 are split alike at rest, and that is what a mesh must divide.
        legal = {(min(z, 1), s) for z, s in self._plain if mesh.allows(self._plain[z, s], sizes)}
        return [(z, s, self.config.offload) for s in sequences for z in zeros if (min(z, 1), s) in legal]

    @cached_property
    def _plain(self) -> dict[tuple[int, bool], RunConfig]:
        """The configuration for each kind of split, without what orders() looks at."""
        cut: dict[str, Any] = {"schedule": "1f1b", "virtual_stages": 1, "stages": "auto", "micro_batch": None}
        zeros: tuple[Any, ...] = (0, 1) if "zero" in self.free else (min(self.config.zero, 1),)
        sequences = (False, True) if "sequence_parallel" in self.free else (self.config.sequence_parallel,)
        splits = [{"zero": zero, "sequence_parallel": split} for zero in zeros for split in sequences]
        return {(each["zero"], each["sequence_parallel"]): replace(self.config, **cut, **each) for each in splits}

    def orders(self, sizes: Sizes) -> Iterator[tuple[Order, int]]:
        """Schedules and microbatches that go together. Whether the batch can be split at all is splits()'s to say."""
        share = self.config.global_batch // (sizes["data"] * sizes["fsdp"])
        for order in self.schedules(sizes["pipe"]):
            for micro in self._micro_batches(sizes, order, share):
                interleaved = order[0] == "interleaved" and sizes["pipe"] > 1
                if share % micro == 0 and not (interleaved and share // micro % sizes["pipe"]):
                    yield order, micro

    def _micro_batches(self, sizes: Sizes, order: Order, share: int) -> list[int]:
        if "micro_batch" in self.free:
            return _divisors(share)
        named: Any = order[0]
        return [micro_batch(replace(self.config, schedule=named, virtual_stages=order[1]), sizes)]

    def schedules(self, stages: int) -> list[Order]:
        """Schedules, with virtual stages, that so many stages can run."""
        name, chunks = self.config.schedule, self.config.virtual_stages
        open_name, open_chunks = "schedule" in self.free, "virtual_stages" in self.free
        found: list[Order] = []
        if stages == 1:
            found = [("1f1b" if open_name else name, 1)] if open_chunks or chunks == 1 else []
        elif open_chunks or chunks == 1:
            found = [(each, 1) for each in (("1f1b", "zero-bubble") if open_name else (name,)) if each != "interleaved"]
        if stages > 1 and (open_name or name == "interleaved"):
            found += [("interleaved", each) for each in self._chunks(stages) if each > 1]
        return [(each, cut) for each, cut in found if self._placed(stages, cut)]

    def _chunks(self, stages: int) -> list[int]:
        """Virtual stages: for each length of the longest part the fewest that cut the layers so."""
        layers = self.config.model.layers
        if "virtual_stages" not in self.free:
            return [self.config.virtual_stages]
        if self.config.stages != "auto":
            return list(range(1, layers // stages + 1))
        return sorted({math.ceil(layers / (stages * longest)) for longest in range(1, layers + 1)})

    def _placed(self, stages: int, chunks: int) -> bool:
        try:
            place(self.config.model.layers, stages, chunks, self.config.stages)
        except UserError:
            return False
        return True

    def _context_attention(self, sizes: Sizes) -> Any:
        said = self.config.context_attention
        return ("gather" if sizes["pipe"] > 1 else "ring") if said == "auto" else said


@functools.cache
def _ladders(rows: int) -> tuple[tuple[str, ...], ...]:
    """For parts of so many layers."""
    return tuple(tuple(counted(kind, n, rows) for n in range(rows + 1)) for kind in KINDS[1:])


@functools.cache
def _divisors(n: int) -> list[int]:
    return [each for each in range(1, n + 1) if n % each == 0]
