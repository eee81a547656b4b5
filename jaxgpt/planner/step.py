"""Time of a whole step: what planner.cost says of a block and the ends, put together as the schedule's table has it."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxgpt.planner.cost import Costs, over_context, over_tensor, over_weights, reordered, seen
from jaxgpt.planner.links import Group, group
from jaxgpt.planner.memory import host_memory
from jaxgpt.planner.plan import Plan, Time
from jaxgpt.planner.ticks import table_time, ticks
from jaxgpt.recomputation import Kind, recomputation

Axes = tuple[str, ...]


@dataclass(frozen=True)
class _Block:
    """Seconds of a block for one microbatch, communication within included: forward, and backward in its two parts."""

    forward: float
    to_input: float
    to_weights: float
    computed: float
    """Of all three, computation; what is computed again included."""
    sent: Mapping[str, float]
    """And communication, by axis."""

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.to_input + self.to_weights

    def mixed(self, other: "_Block", share: float) -> "_Block":
        """The mean of blocks, of which a share is this one and the rest the other."""

        def mean(one: float, two: float) -> float:
            return share * one + (1 - share) * two

        return _Block(
            forward=mean(self.forward, other.forward),
            to_input=mean(self.to_input, other.to_input),
            to_weights=mean(self.to_weights, other.to_weights),
            computed=mean(self.computed, other.computed),
            sent={axis: mean(seconds, other.sent[axis]) for axis, seconds in self.sent.items()},
        )


def step_time(costs: Costs, plan: Plan, global_batch: int) -> Time:
    """Of a legal plan."""
    return _Step(costs, plan, plan.microbatches(global_batch)).time()


@dataclass(frozen=True)
class _Step:
    costs: Costs
    plan: Plan
    microbatches: int

    def group(self, *axes: str) -> Group:
        plan, known = self.plan, self.costs.groups
        key = axes, plan.pipe, plan.data, plan.fsdp, plan.context, plan.tensor
        if key not in known:
            known[key] = group(self.costs.hardware, plan.sizes, axes)
        return known[key]

    def time(self) -> Time:
        """All parts. What is computed counts as if blocks were shared evenly by the stages; all that a stage waits
        beside that, for others or for the longest part, is the bubble. It is so of devices that share a processor, too:
        what one leaves of it the others could use, but all meet several times a tick, and so four fifths were lost."""
        plan, costs = self.plan, self.costs
        block, longest = self._blocks()
        share = self.microbatches * costs.model.layers / plan.pipe
        ends = costs.ends(plan)
        ends_here = ends if costs.practice.shared_ends else ends / plan.pipe
        computation = share * block.computed + self.microbatches * ends_here
        sent = {axis: share * seconds for axis, seconds in block.sent.items()}
        for axis, seconds in (*self._at_ends().items(), *self._reductions().items()):
            sent[axis] = sent.get(axis, 0.0) + seconds
        within = share * block.both + self.microbatches * ends_here
        bubble = self._pipeline(block, longest, ends) - within
        if plan.pipe > 1:
            sent["pipe"] = sent.get("pipe", 0.0) + self._messages()
        return Time(
            computation=computation,
            exposed={axis: seconds for axis, seconds in sent.items() if seconds > 0},
            bubble=max(0.0, bubble),
            optimizer=self._optimizer(),
            offload=self._offload(),
        )

    def _blocks(self) -> tuple[_Block, _Block]:
        """The mean of all blocks, and of those of the longest part."""
        said, rows = recomputation(self.plan.recompute), self._longest()
        block = self._block(said.kind)
        if said.layers is None:
            return block, block
        other = self._block("none")
        whole = block.mixed(other, self.plan.repeated(self.costs.model.layers))
        return whole, block.mixed(other, said.of(rows) / rows)

    def _block(self, recompute: Kind) -> _Block:
        plan, costs, work = self.plan, self.costs, self.costs.block(self.plan)
        again = work.again(recompute, costs.practice)
        sent: dict[str, tuple[float, float]] = {}
        if plan.tensor > 1:
            sent["tensor"] = over_tensor(costs, plan, self.group("tensor"), recompute)
        if plan.context > 1:
            sent["context"] = over_context(costs, plan, self.group("context"), work, recompute)
        used, accumulated = self._split_axes()
        if accumulated:
            axis = "fsdp" if plan.fsdp > 1 else "data"
            sent[axis] = over_weights(costs, plan, self.group(*used), self.group(*accumulated), work)
        forward, backward = (sum(each[i] for each in sent.values()) for i in (0, 1))
        return _Block(
            forward=work.forward + forward,
            to_input=work.to_input + again + backward,
            to_weights=work.to_weights,
            computed=work.forward + work.backward + again,
            sent={axis: sum(each) for axis, each in sent.items()},
        )

    def _split_axes(self) -> tuple[Axes, Axes]:
        """Axes over which weights lie split between uses, and gradients while they are accumulated (sharding.rows)."""
        zero, fsdp = self.plan.zero, ("fsdp",) if self.plan.fsdp > 1 else ()
        data = ("data",) if self.plan.data > 1 else ()
        return (*fsdp, *(data if zero == 3 else ())), (*fsdp, *(data if zero >= 2 else ()))

    def _pipeline(self, block: _Block, longest: _Block, ends: float) -> float:
        """Time from the first forward to the last backward, messages between stages not counted. longest: the mean
        block of the longest part."""
        plan, m, p, v = self.plan, self.microbatches, self.plan.pipe, self.plan.virtual_stages
        layers = self.costs.model.layers
        if self.costs.practice.shared_ends or p == 1:
            lengths = (self._longest() * each for each in (longest.forward, longest.to_input, longest.to_weights))
            return m * ends + table_time(plan.schedule, p, m, v, *lengths)
        # stages on their own: the slowest is never idle but while the first microbatch passes through the others
        stage = layers / p * block.both
        slowest = self._longest() * v * longest.both + ends
        return m * slowest + (p - 1) * stage / v

    def _longest(self) -> int:
        """Blocks of the longest part."""
        return self.plan.longest(self.costs.model.layers)

    # Communication outside of blocks

    def _messages(self) -> float:
        """Between the stages. In tied ticks one each way in every tick; else each chunk's, the first and the last of a
        step, for which nothing else can be done, in full view."""
        plan, ways, m = self.plan, self.costs.practice, self.microbatches
        stream = self.costs.stream(plan)
        split = plan.sequence_parallel or ways.split_messages
        message = self.group("pipe").permute(stream / (plan.tensor if split else 1))
        if split and not plan.sequence_parallel:
            message += self.group("tensor").all_gather(stream)
        if ways.tied_ticks:
            return 2 * message * ticks(plan.schedule, plan.pipe, m, plan.virtual_stages)
        return 2 * message * (seen(1.0, ways.hidden_pipe) * m * plan.virtual_stages + plan.pipe - 1)

    def _at_ends(self) -> dict[str, float]:
        """By axis, of lookup, head and their gradients: sums over tensor, and over pipe where all stages share them;
        gathers of the tables and scattering sums of their gradients, in every tick."""
        plan, ways, m, costs = self.plan, self.costs.practice, self.microbatches, self.costs
        stream, tensor, pipe = costs.stream(plan), self.group("tensor"), self.group("pipe")
        met, sent = ways.shared_ends and plan.pipe > 1, {}
        if plan.sequence_parallel:
            sent["tensor"] = m * 5 * tensor.all_gather(stream)
            if met:
                sent["pipe"] = m * 4 * pipe.all_reduce(stream / plan.tensor)
        elif met:  # the lookup and the head's gradient are sums over both
            sent["pipe"] = m * 2 * (self.group("pipe", "tensor").all_reduce(stream) + pipe.all_reduce(stream))
        else:
            sent["tensor"] = m * 2 * tensor.all_reduce(stream)
        used, accumulated = self._split_axes()
        if accumulated:
            turns = ticks(plan.schedule, plan.pipe, m, plan.virtual_stages)
            table = costs.tables / (plan.tensor * (plan.pipe if ways.shared_ends else 1))
            sent["fsdp" if plan.fsdp > 1 else "data"] = turns * sum(
                reordered(costs, table, self.group(*used), self.group(*accumulated))
            )
        return sent

    def _weights_here(self) -> tuple[float, float]:
        """Entries of blocks and of the ends' tables on one device, before FSDP and ZeRO."""
        plan, costs = self.plan, self.costs
        shared = plan.pipe if costs.practice.shared_ends else 1
        blocks = self._longest() * plan.virtual_stages * costs.block_weights / plan.tensor
        return blocks, costs.tables / (plan.tensor * shared) + costs.places

    def _reductions(self) -> dict[str, float]:
        """By axis, once a step: gradients summed over what they are not accumulated over split, and with ZeRO 1 and 2
        weights gathered. What can hide does so under the last backward, but for the tables' gradients, which come
        last; the gathers under the first forward."""
        plan, ways, costs = self.plan, self.costs.practice, self.costs
        blocks, tables = (each / plan.fsdp for each in self._weights_here())
        over_data = self.group("data") if plan.zero <= 1 else self.group()
        already = plan.data if plan.zero >= 2 else 1
        nbytes = ways.gradient_bytes * (blocks + tables) / already
        sent: dict[str, float] = {}
        if plan.zero == 0:
            reduced = self.group("data", "context").all_reduce(nbytes)
        else:
            scattered = nbytes / (plan.data if plan.zero == 1 else 1)
            reduced = over_data.reduce_scatter(nbytes) + self.group("context").all_reduce(scattered)
        work, layers = costs.block(plan), costs.model.layers / plan.pipe
        if plan.schedule == "interleaved":  # a part is done when the last group of microbatches has passed through it
            layers *= plan.pipe
        table = tables / (blocks + tables)
        last, rest = reduced * table, reduced * (1 - table)
        sent["data" if plan.data > 1 else "context"] = last + seen(rest, ways.hidden_gradients * layers * work.backward)
        if ways.shared_ends and plan.pipe > 1:  # what all stages hold whole
            sent["pipe"] = self.group("pipe").all_reduce(ways.gradient_bytes * costs.places / plan.fsdp)
        if plan.zero in (1, 2):
            gathered = self.group("data").all_gather(costs.kernels.bytes * (blocks + tables))
            sent["data"] = sent.get("data", 0.0) + seen(gathered, ways.hidden_gradients * layers * work.forward)
        return sent

    def _optimizer(self) -> float:
        """Bytes of a device's part of the state, and the sum of the norm over all devices."""
        plan = self.plan
        held = sum(self._weights_here()) / (plan.fsdp * (plan.data if plan.zero else 1))
        norm = self.group("pipe", "data", "fsdp", "context", "tensor").all_reduce(4)
        return self.costs.kernels.passes(self.costs.practice.update_bytes * held) + norm

    def _offload(self) -> float:
        """State that lies in the host's memory: masters read once to compute with; masters and moments read, and
        written again, by the update. Nothing of it hides."""
        entries = host_memory(self.costs, self.plan) / 24
        return 28 * entries / self.costs.hardware.offload.bandwidth
