"""The fastest plans, exactly: best first through all legal ones, by lower bounds of their time and memory.

    found = rank(Space(config, 1024, "a100-80gb", frozenset(FREE)), find("a100-80gb"), top=5)

What a plan's data parallelism costs depends on how its replicas are divided over `data` and `fsdp`, and on ZeRO; what
all else costs does not. So plans are taken together that differ in those alone, and a floor is put under them: the time
of their computation, bubble and other communication, where no weights are gathered in the blocks. Floors are refined
from groups of schedules down to single plans, always the lowest first, until the best found is below all that is left.
A recomputation is passed over where even the state split over all replicas leaves no room for what it keeps, of which
no schedule keeps less than half of 1F1B's: p of its 2 p - 1 microbatches on p stages.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxgpt.config import RunConfig
from jaxgpt.planner.cost import costs
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import Dtype, Hardware
from jaxgpt.planner.legal import Order, Space, Split
from jaxgpt.planner.memory import fits, peak_memory
from jaxgpt.planner.plan import Estimate, Plan
from jaxgpt.planner.practice import ours
from jaxgpt.planner.step import step_time
from jaxgpt.sharding.mesh import Sizes

Group = tuple[int, int, int, int]
"""Sizes of pipe, context and tensor, and replicas: the meshes that differ in data and fsdp alone."""


@dataclass(frozen=True)
class Ranking:
    """What a search has found."""

    space: Space
    plans: list[Estimate]
    """The fastest first; of each mesh its best plan alone, unless the mesh was given. All fit, or none does and these
    need least memory."""
    too_large: Estimate | None
    """The fastest plan of all, where it does not fit."""
    meshes: int
    legal: int
    """Plans on them."""
    predicted: int
    """Predictions that finding the fastest took."""

    @property
    def fits(self) -> bool:
        return bool(self.plans) and self.plans[0].fits


def dtype_of(config: RunConfig, hardware: Hardware) -> Dtype:
    """The type that a run on this hardware computes in."""
    automatic: Dtype = "fp32" if hardware.kind == "cpu" else "bf16"
    return automatic if config.dtype == "auto" else config.dtype


def rank(space: Space, hardware: Hardware, top: int = 5) -> Ranking:
    """The `top` fastest plans that fit. Where none fits, the one that needs least memory; none where none is legal."""
    search = _Search(space, hardware)
    found = search.fastest(top, fitting=True)
    unlimited = search.fastest(1, fitting=False)
    too_large = unlimited[0] if unlimited and not unlimited[0].fits else None
    found = found or search.smallest()
    return Ranking(space, found, too_large, len(search.meshes), search.legal, len(search.predicted))


def smallest(space: Space, hardware: Hardware) -> Estimate | None:
    """The plan that needs least memory, if any is legal."""
    return next(iter(_Search(space, hardware).smallest()), None)


@dataclass(frozen=True)
class _Choice:
    """Plans that differ in data, fsdp and ZeRO alone, and in recomputation; order None: in the schedule, too."""

    group: Group
    micro: int
    sequence_parallel: bool
    order: Order | None
    recompute: int
    """The first of Space.recomputations that leaves room."""


@dataclass
class _Search:
    space: Space
    hardware: Hardware
    predicted: dict[Plan, Estimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.space.config
        self.dtype = dtype_of(config, self.hardware)
        self.practice = ours(config.documents)
        self.costs = costs(config.model, self.hardware, self.practice, self.dtype)
        self.meshes = list(self.space.meshes())
        self.groups: dict[Group, list[Sizes]] = defaultdict(list)
        self.splits: dict[Group, list[tuple[Sizes, Split]]] = defaultdict(list)
        self.orders: dict[Group, dict[int, list[Order]]] = {}
        self.legal = 0
        for sizes in self.meshes:
            group = sizes["pipe"], sizes["context"], sizes["tensor"], sizes["data"] * sizes["fsdp"]
            self.groups[group].append(sizes)
            self.splits[group] += [(sizes, split) for split in self.space.splits(sizes)]
            if group not in self.orders:
                of_micro = self.orders[group] = defaultdict(list)
                for order, micro in self.space.orders(sizes):
                    of_micro[micro].append(order)
        for group, splits in self.splits.items():
            orders = sum(len(each) for each in self.orders[group].values())
            self.legal += len(splits) * orders * len(self.space.recomputations)

    # Fastest

    def fastest(self, top: int, fitting: bool) -> list[Estimate]:
        """fitting: of those that fit alone."""
        best: dict[object, Estimate] = {}
        count = itertools.count()  # of equal floors the one that came first
        heap = [(floor, next(count), choice) for floor, choice in self._begin(fitting)]
        heapq.heapify(heap)
        last = float("inf")
        while heap and heap[0][0] <= last:
            _, _, choice = heapq.heappop(heap)
            if choice.order is None:
                for floor, each in self._refined(choice, fitting):
                    heapq.heappush(heap, (floor, next(count), each))
                continue
            for found in self._members(choice, fitting):
                key = self._key(found.plan)
                if key not in best or _rank(found) < _rank(best[key]):
                    best[key] = found
                    last = _last(best, top)
        return sorted(best.values(), key=_rank)[:top]

    def _key(self, plan: Plan) -> object:
        """Plans with the same one stand in one place of the ranking."""
        return tuple(plan.sizes.values()) if "mesh" in self.space.free else plan

    def _begin(self, fitting: bool) -> Iterator[tuple[float, _Choice]]:
        """All plans in groups, each with its floor."""
        for group, of_micro in self.orders.items():
            for sequence in sorted({split[1] for _, split in self.splits[group]}):
                for micro in of_micro:
                    yield from self._floor(_Choice(group, micro, sequence, None, 0), fitting)

    def _refined(self, choice: _Choice, fitting: bool) -> Iterator[tuple[float, _Choice]]:
        """The same for each schedule by itself."""
        for order in self.orders[choice.group][choice.micro]:
            yield from self._floor(replace(choice, order=order), fitting)

    def _floor(self, choice: _Choice, fitting: bool) -> Iterator[tuple[float, _Choice]]:
        """The choice with a time that none of its plans is below; nothing where none of them can fit."""
        replicas, batch = choice.group[-1], self.space.config.global_batch
        for again in range(choice.recompute, len(self.space.recomputations)):
            memory = peak_memory(self.costs, self._any(choice, again, data=1, fsdp=replicas), batch)
            share = 2 if choice.order is None and choice.group[0] > 1 else 1
            held = memory.parameters + memory.gradients + memory.optimizer + memory.activations // share
            if fitting and not fits(held, self.hardware):
                continue
            time = step_time(self.costs, self._any(choice, again, data=replicas, fsdp=1), batch)
            floor = time.computation + sum(time.exposed.get(axis, 0.0) for axis in ("context", "tensor"))
            if choice.order is not None:
                floor += time.bubble + time.exposed.get("pipe", 0.0)
            yield floor, replace(choice, recompute=again)
            return

    def _any(self, choice: _Choice, again: int, data: int, fsdp: int) -> Plan:
        """A plan of the choice with its replicas divided so, whether that is legal or not."""
        pipe, context, tensor, _ = choice.group
        sizes = {"pipe": pipe, "data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
        order, split = choice.order or ("1f1b", 1), (0, choice.sequence_parallel)
        return self.space.plan(sizes, order, choice.micro, split, self.space.recomputations[again])

    def _members(self, choice: _Choice, fitting: bool) -> Iterator[Estimate]:
        """The plans of a choice: of those that differ in recomputation alone, the first that fits."""
        assert choice.order is not None
        for sizes, split in self.splits[choice.group]:
            if split[1] != choice.sequence_parallel:
                continue
            for recompute in self.space.recomputations[choice.recompute :]:
                found = self._estimate(self.space.plan(sizes, choice.order, choice.micro, split, recompute))
                if found.fits or not fitting:
                    yield found
                    if "mesh" in self.space.free:
                        break

    def _estimate(self, plan: Plan) -> Estimate:
        if plan not in self.predicted:
            config = self.space.config
            batch = config.global_batch
            self.predicted[plan] = estimate(config.model, plan, self.hardware, batch, self.practice, self.dtype)
        return self.predicted[plan]

    def smallest(self) -> list[Estimate]:
        """The plan that needs least memory, or none: of those with the smallest microbatch and the most recomputation.
        What the state takes does not depend on the schedule."""
        again, found = self.space.recomputations[-1], []
        for group, splits in self.splits.items():
            micro = min(self.orders[group])
            orders = self.orders[group][micro]
            plans = [self.space.plan(sizes, orders[0], micro, split, again) for sizes, split in splits]
            least = min((self._estimate(plan) for plan in plans), key=lambda each: each.peak_bytes).plan
            split = least.zero, least.sequence_parallel
            found += [self._estimate(self.space.plan(least.sizes, order, micro, split, again)) for order in orders]
        return sorted(found, key=lambda each: (each.peak_bytes, _rank(each)))[:1]


def _rank(each: Estimate) -> tuple[float, int, str]:
    """What decides between two plans: time; memory where it is the same but for rounding; the text of the plan."""
    return float(f"{each.step_seconds:.9g}"), each.peak_bytes, repr(each.plan)


def _last(best: dict[object, Estimate], top: int) -> float:
    """What a plan must be below to come among the best."""
    if len(best) < top:
        return float("inf")
    return heapq.nsmallest(top, (each.step_seconds for each in best.values()))[-1] * (1 + 1e-9)
