"""The fastest plans, exactly: best first through all legal ones, by lower bounds of their time and memory.

    found = rank(Space(config, 1024, "a100-80gb", frozenset(FREE)), find("a100-80gb"), top=5)

What a plan's data parallelism costs depends on how its replicas are divided over `data` and `fsdp`, and on ZeRO; what
all else costs does not. So plans are taken together that differ in those alone, and a floor is put under them: the time
of their computation, bubble and other communication, where no weights are gathered in the blocks. Floors are refined
from groups of schedules down to single plans, always the lowest first, until the best found is below all that is left.
Of plans that differ in recomputation alone, the one by the fewest layers that fits is the fastest of its kind: with
every layer more the time grows, and the memory shrinks. A count is passed over where even the state split over all
replicas leaves no room for what it keeps, of which no schedule keeps less than half of 1F1B's: p of its 2 p - 1
microbatches on p stages.
"""

import bisect
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal

from jaxgpt.config import RunConfig
from jaxgpt.planner.cost import costs
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import Dtype, Hardware
from jaxgpt.planner.legal import Order, Space, Split
from jaxgpt.planner.memory import fits, host_memory, peak_memory, room
from jaxgpt.planner.plan import Estimate, Plan
from jaxgpt.planner.practice import ours
from jaxgpt.planner.step import step_time
from jaxgpt.sharding.mesh import Sizes

OFFLOAD: tuple[Literal["none", "optimizer"], ...] = ("none", "optimizer")
"""Tried in this order."""
ROUNDING = 1e-6
"""Of a place in a ladder."""
ANY_ORDER: Order = ("1f1b", 1)
"""In the place of schedules that are taken together."""
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
    """The `top` fastest plans that fit. Where none fits, the one that needs least memory; none where none is legal.

    Offload, if it is free, is taken where nothing fits without it: a step that waits for the host's memory is slower
    than one that computes more again, unless it has few tokens a device.
    """
    if "offload" in space.free:
        closed = replace(space, free=space.free - {"offload"})
        without, with_it = (replace(closed, config=replace(space.config, offload=each)) for each in OFFLOAD)
        ranking = rank(without, hardware, top)
        return ranking if ranking.fits or not ranking.plans else rank(with_it, hardware, top)
    search = _Search(space, hardware)
    found = search.fastest(top, fitting=True)
    unlimited = search.fastest(1, fitting=False)
    too_large = unlimited[0] if unlimited and not unlimited[0].fits else None
    found = found or search.smallest()
    return Ranking(space, found, too_large, len(search.meshes), search.legal, len(search.predicted))


def smallest(space: Space, hardware: Hardware) -> Estimate | None:
    """The plan that needs least memory, if any is legal."""
    if "offload" in space.free:
        space = replace(space, config=replace(space.config, offload=OFFLOAD[-1]))
    return next(iter(_Search(space, hardware).smallest()), None)


@dataclass(frozen=True)
class _Choice:
    """Plans that differ in data, fsdp and ZeRO alone, and in recomputation; order None: in the schedule, too."""

    group: Group
    micro: int
    split: tuple[bool, str | None]
    """Sequence parallelism and offload; None: with any."""
    order: Order | None
    least: tuple[int | None, ...] = ()
    """In each of the space's ladders the first place that may leave room; None: none does."""


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
            orders = itertools.chain.from_iterable(self.orders[group].values())
            self.legal += len(splits) * sum(len(self.space.recomputations(group[0], order)) for order in orders)

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
        return tuple(plan.sizes.values()) if "mesh" in self.space.free else replace(plan, recompute="none")

    def _begin(self, fitting: bool) -> Iterator[tuple[float, _Choice]]:
        """All plans in groups, each with its floor."""
        for group, of_micro in self.orders.items():
            for sequence in dict.fromkeys(split[1] for _, split in self.splits[group]):
                for micro in of_micro:
                    yield from self._bare(_Choice(group, micro, (sequence, None), None))

    def _refined(self, choice: _Choice, fitting: bool) -> Iterator[tuple[float, _Choice]]:
        """The same for each offload, and then for each schedule, by itself."""
        if choice.split[1] is None:
            for offload in dict.fromkeys(split[2] for _, split in self.splits[choice.group]):
                yield from self._floor(replace(choice, split=(choice.split[0], offload)), fitting)
            return
        for order in self.orders[choice.group][choice.micro]:
            yield from self._floor(replace(choice, order=order), fitting)

    def _bare(self, choice: _Choice) -> Iterator[tuple[float, _Choice]]:
        """The choice with a first floor, which asks for no memory: with nothing, or as little as is legal, computed
        again."""
        plan = self._any(choice, self._ladders(choice)[0][0], data=choice.group[-1], fsdp=1)
        time = step_time(self.costs, plan, self.space.config.global_batch)
        yield time.computation + sum(time.exposed.get(axis, 0.0) for axis in ("context", "tensor")), choice

    def _floor(self, choice: _Choice, fitting: bool) -> Iterator[tuple[float, _Choice]]:
        """The choice with a time that none of its plans is below; nothing where none of them can fit."""
        replicas, batch = choice.group[-1], self.space.config.global_batch
        share = 2 if choice.order is None and choice.group[0] > 1 else 1

        @cache
        def held(recompute: str) -> float:
            memory = peak_memory(self.costs, self._any(choice, recompute, data=1, fsdp=replicas), batch)
            return memory.parameters + memory.gradients + memory.optimizer + memory.activations / share

        def first(ladder: tuple[str, ...]) -> int | None:
            """The first place that may have room: what blocks keep shrinks by as much with each layer more."""
            if not fitting or held(ladder[0]) <= room(self.hardware):
                return 0
            if held(ladder[-1]) > room(self.hardware):
                return None
            excess, shrinks = held(ladder[0]) - room(self.hardware), held(ladder[0]) - held(ladder[-1])
            return max(1, math.ceil((len(ladder) - 1) * excess / shrinks - ROUNDING))

        @cache
        def time_of(recompute: str) -> float:
            time = step_time(self.costs, self._any(choice, recompute, data=replicas, fsdp=1), batch)
            least = time.computation + sum(time.exposed.get(axis, 0.0) for axis in ("context", "tensor"))
            least += time.offload / replicas
            return least if choice.order is None else least + time.bubble + time.exposed.get("pipe", 0.0)

        def floor(ladder: tuple[str, ...], place: int) -> float:
            if choice.order is not None or place == 0:
                return time_of(ladder[place])
            share = (place - 1) / (len(ladder) - 1)  # other schedules may cut the layers finer: more than this it is
            return (1 - share) * time_of(ladder[0]) + share * time_of(ladder[-1])

        ladders = self._ladders(choice)
        least = tuple(map(first, ladders))
        floors = [floor(ladder, n) for ladder, n in zip(ladders, least, strict=True) if n is not None]
        if floors:
            yield min(floors), replace(choice, least=least)

    def _may(self, plan: Callable[[str], Plan], fitting: bool, again: str) -> bool:
        """Whether the plan that recomputes so may be taken."""
        return not fitting or self._fits(plan(again))

    def _ladders(self, choice: _Choice) -> tuple[tuple[str, ...], ...]:
        return self.space.ladders(choice.group[0], choice.order or ANY_ORDER)

    def _any(self, choice: _Choice, recompute: str, data: int, fsdp: int) -> Plan:
        """A plan of the choice with its replicas divided so, whether that is legal or not."""
        pipe, context, tensor, _ = choice.group
        sizes = {"pipe": pipe, "data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
        order, split = choice.order or ANY_ORDER, (0, choice.split[0], choice.split[1] or "none")
        return self.space.plan(sizes, order, choice.micro, split, recompute)

    def _members(self, choice: _Choice, fitting: bool) -> Iterator[Estimate]:
        """The plans of a choice: of those that differ in recomputation alone, of each kind the first that fits."""
        assert choice.order is not None
        for sizes, split in self.splits[choice.group]:
            if split[1:] != choice.split:
                continue
            plan = partial(self.space.plan, sizes, choice.order, choice.micro, split)
            for ladder, low in zip(self._ladders(choice), choice.least, strict=True):
                if low is None:
                    continue
                first = _first(ladder, partial(self._may, plan, fitting), low)
                if first is not None:
                    yield self._estimate(plan(ladder[first]))
                if first == 0:
                    break

    def _fits(self, plan: Plan) -> bool:
        memory = peak_memory(self.costs, plan, self.space.config.global_batch)
        return fits(memory.peak, self.hardware) and host_memory(self.costs, plan) <= self.hardware.offload.memory

    def _estimate(self, plan: Plan) -> Estimate:
        if plan not in self.predicted:
            config = self.space.config
            batch = config.global_batch
            self.predicted[plan] = estimate(config.model, plan, self.hardware, batch, self.practice, self.dtype)
        return self.predicted[plan]

    def smallest(self) -> list[Estimate]:
        """The plan that needs least memory, or none: of those with the smallest microbatch and the most recomputation.
        What the state takes does not depend on the schedule."""
        found: list[Estimate] = []
        for group, splits in self.splits.items():
            micro = min(self.orders[group])
            orders = self.orders[group][micro]
            again = self.space.ladders(group[0], orders[0])[-1][-1]
            plans = [self.space.plan(sizes, orders[0], micro, split, again) for sizes, split in splits]
            least = min((self._estimate(plan) for plan in plans), key=lambda each: each.peak_bytes).plan
            split = least.zero, least.sequence_parallel, least.offload
            found += [self._estimate(self.space.plan(least.sizes, order, micro, split, again)) for order in orders]
        return sorted(found, key=lambda each: (each.peak_bytes, _rank(each)))[:1]


def _first(ladder: tuple[str, ...], fitting: Callable[[str], bool], low: int) -> int | None:
    """The first place from `low` on that has room, where all after it have; the last is looked at by itself, as a part
    all of whose blocks compute again has no others that keep more, and may hold more than one with a single such."""
    last = len(ladder) - 1
    if fitting(ladder[low]):
        return low
    found = low + 1 + bisect.bisect_left(range(low + 1, last), True, key=lambda n: fitting(ladder[n]))
    return found if found < last or (found == last and fitting(ladder[last])) else None


def _rank(each: Estimate) -> tuple[float, int, str]:
    """What decides between two plans: time; memory where it is the same but for rounding; the text of the plan."""
    return float(f"{each.step_seconds:.9g}"), each.peak_bytes, repr(each.plan)


def _last(best: dict[object, Estimate], top: int) -> float:
    """What a plan must be below to come among the best."""
    if len(best) < top:
        return float("inf")
    return heapq.nsmallest(top, (each.step_seconds for each in best.values()))[-1] * (1 + 1e-9)
