"""Memory of a plan: what the compiled step holds on the fullest device at its peak, by kind.

State and gradients are counted from the table of parameters and the layout, activations from the arrays that a block
hands from forward to backward, times the places that the schedule's table needs for them. What the compiler holds
beside is counted as what the program visibly makes: a block's inside, a chunk of logits, gathered weights, the rows
that a stage takes out of its arrays. Rings and gradients are changed in place, and have no second copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from jaxgpt.planner.cost import Costs
from jaxgpt.planner.hardware import Hardware
from jaxgpt.planner.plan import Memory, Plan
from jaxgpt.planner.practice import Held
from jaxgpt.planner.ticks import Rings, rings
from jaxgpt.recomputation import Kind, recomputation

MARGIN = 0.08
"""By how much a compiled program may need more than is predicted; `fits` allows for it."""
CHUNK_LOGITS = 2**25
"""Logits held at once (model.vocabulary)."""


def fits(peak: int, hardware: Hardware) -> bool:
    """Whether a peak, MARGIN above what is predicted, is within the device's memory."""
    return peak <= room(hardware)


def room(hardware: Hardware) -> float:
    """Bytes of the device's memory that a predicted peak may take."""
    return hardware.memory / (1 + MARGIN)


def peak_memory(costs: Costs, plan: Plan, global_batch: int) -> Memory:
    """Of a legal plan, bytes on the fullest device."""
    held = costs.practice.held
    if held is not None:
        return _other(costs, plan, held)
    return _Compiled(costs, plan, plan.microbatches(global_batch)).memory()


def host_memory(costs: Costs, plan: Plan) -> int:
    """Bytes of the host's memory that a plan takes for one device: masters and moments, where they lie there, twice
    while they are updated (training.offload). On CPU all memory is the host's."""
    if plan.offload == "none" or costs.hardware.kind == "cpu":
        return 0
    return 24 * _Compiled(costs, plan, 1).at_rest


# Other programs


def _other(costs: Costs, plan: Plan, held: Held) -> Memory:
    """Of another program: state by its bytes a parameter; what blocks keep (arXiv 2205.05198), for as many microbatches
    as the first stage holds (arXiv 2104.04473); and one block's inside where it is recomputed, or the logits."""
    model, tokens, t, p, v = costs.model, costs.tokens(plan), plan.tensor, plan.pipe, plan.virtual_stages
    blocks = -(-model.layers // p)
    entries = (blocks * costs.block_weights + costs.tables) // t + model.seq * model.width
    moments = 12 * entries // (plan.data if plan.zero else 1)
    state = held.parameter - 12 + (held.reduced if plan.data > 1 else 0)
    stream = tokens * model.width
    inside = stream * 34 // t if plan.sequence_parallel else stream * (10 + 24 // t)
    scores = 0
    if not costs.practice.fused_attention:
        scores = 5 * plan.micro_batch * model.heads // t * model.seq * model.seq
    boundary = held.boundary * stream // (t if plan.sequence_parallel else 1)
    of_block = {"full": boundary, "selective": inside, "none": inside + scores}
    said = recomputation(plan.recompute)
    repeated = said.of(blocks)
    kept = repeated * of_block[said.kind] + (blocks - repeated) * of_block["none"]
    again = {"full": inside + scores, "selective": scores, "none": 0}[said.kind]
    microbatches = p + (p - 1) / v if v > 1 else held.microbatches(p)
    logits = held.logit * tokens * model.padded_vocab // t
    return Memory(
        parameters=2 * entries,
        gradients=(state - 2) * entries,
        optimizer=moments,
        activations=round(kept * microbatches),
        logits=max(0, logits - again),
        buffers=again + held.overhead + (held.communication if plan.devices > 1 else 0),
    )


# jaxgpt

INSIDE = {"none": 12, "selective": 20, "full": 18}
"""Arrays of [tokens, width] that a block's backward holds at its peak, by what it recomputes; read from the compiler's
assignment of buffers."""
BETWEEN = {"none": (10, 1, 0, 1), "selective": (14, 1, 0, 1), "full": (12, 1, 1, 2)}
"""What the first part of a split backward hands to the second, what is recomputed among it: arrays of the stream, fp32
ones counted twice, of queries with keys and values, of attention's output, and of the feed-forward layer's inside; read
from the types of the traced step."""


@dataclass(frozen=True)
class _Arrays:
    """Bytes of a block's arrays on one device."""

    qkv: int
    heads: int
    """Attention's output."""
    mlp_in: int
    """The feed-forward layer's inside before its activation."""
    mlp: int
    """And after."""


@dataclass(frozen=True)
class _Compiled:
    costs: Costs
    plan: Plan
    microbatches: int

    def memory(self) -> Memory:
        """At the peak, which is in the backward of a stage or in the head, whichever holds more."""
        plan, costs = self.plan, self.costs
        blocks, ends = self._entries()
        all_of_it, rest = blocks + ends, self.at_rest
        accumulated = plan.fsdp * (plan.data if plan.zero >= 2 else 1)
        used = plan.fsdp * (plan.data if plan.zero == 3 else 1)
        element = costs.kernels.bytes
        weights = element * (all_of_it // used)
        whole_ends = element * ends if used > 1 else 0  # gathered
        inside = self._busiest(used > 1, accumulated)
        head = 6 * self._chunk() * self._vocab() + 3 * self._stream()
        at_head = head > inside
        batch = (12 if costs.practice.masked else 8) * self.microbatches * costs.tokens(plan)
        masters, early = 4 * rest, 0
        if host_memory(costs, plan):  # the compiler brings the tables' moments before it needs them
            masters, early = 0, 8 * rest * ends // all_of_it
        return Memory(
            parameters=masters + weights + whole_ends,
            gradients=4 * (all_of_it // accumulated),
            optimizer=2 * masters,
            activations=self._activations(),
            logits=4 * ends + (head if at_head else 0),
            buffers=early + (0 if at_head else inside) + self._messages() + batch,
        )

    @property
    def at_rest(self) -> int:
        """Entries of the parameters on one device."""
        return sum(self._entries()) // (self.plan.fsdp * (self.plan.data if self.plan.zero else 1))

    def _stream(self) -> int:
        """Bytes of a microbatch's residual stream as it lies between blocks."""
        return self.costs.stream(self.plan) // (self.plan.tensor if self.plan.sequence_parallel else 1)

    def _vocab(self) -> int:
        """Rows of the table on one device."""
        return self.costs.model.padded_vocab // (self.plan.tensor * self.plan.pipe)

    def _chunk(self) -> int:
        """Tokens whose logits are made at once."""
        return min(self.costs.tokens(self.plan), max(1, CHUNK_LOGITS // self._vocab()))

    def _rows(self) -> int:
        """Blocks of a part."""
        return self.plan.longest(self.costs.model.layers)

    def _entries(self) -> tuple[int, int]:
        """Of blocks and ends on one device, before FSDP and ZeRO."""
        plan, costs = self.plan, self.costs
        blocks = self._rows() * plan.virtual_stages * costs.block_weights // plan.tensor
        return blocks, costs.tables // (plan.tensor * plan.pipe) + costs.places

    def _activations(self) -> int:
        """What blocks keep for their backward: of one microbatch; in a pipeline in all places of its ring."""
        kept = self._of_part(lambda blocks: blocks._kept())
        return kept * (self._rings().residuals if self.plan.pipe > 1 else 1)

    def _rings(self) -> Rings:
        return rings(self.plan.schedule, self.plan.pipe, self.microbatches, self.plan.virtual_stages)

    def _messages(self) -> int:
        """Rings of what goes between stages and parts of the backward, and of the head's gradients."""
        found = self._rings()
        messages = found.inbox_forward + found.inbox_backward + found.heads
        between = self._of_part(lambda blocks: blocks._between()) if found.splits else 0
        return messages * self._stream() + found.splits * between

    @cached_property
    def _alike(self) -> tuple["_Compiled", ...]:
        """The plan as if all its blocks computed again what some do, and as if all did what the rest do."""
        said = recomputation(self.plan.recompute)
        if said.layers is None:
            return (self,)
        kinds: tuple[Kind, ...] = (said.kind, "none") if said.of(self._rows()) < self._rows() else (said.kind,)
        return tuple(replace(self, plan=replace(self.plan, recompute=kind)) for kind in kinds)

    def _busiest(self, gathered: bool, accumulated: int) -> int:
        """The most that a block's backward holds, less what is free by then: in a part whose last blocks keep more than
        its first ones, all that the last ones kept, but for a pipeline's rings."""
        first, *others = (each._inside(gathered, accumulated) for each in self._alike)
        if others and self.plan.pipe == 1:
            first -= self._of_part(lambda blocks: 0 if blocks is self._alike[0] else blocks._kept())
        return max(first, *others) if others else first

    def _of_part(self, nbytes: Callable[["_Compiled"], int]) -> int:
        """Bytes of a part's blocks, from those of one of each kind."""
        first, *others = map(nbytes, self._alike)
        rows = self._rows()
        count = recomputation(self.plan.recompute).of(rows) if others else rows
        return count * first + sum((rows - count) * other for other in others)

    def _between(self) -> int:
        """Bytes that the first part of a block's backward hands to the second."""
        streams, qkv, heads, mlps = BETWEEN[self.plan.recompute]
        each = self._arrays()
        return streams * self._stream() + qkv * each.qkv + heads * each.heads + mlps * each.mlp_in

    def _arrays(self) -> _Arrays:
        plan, model, t = self.plan, self.costs.model, self.plan.tensor
        each, heads = self.costs.kernels.bytes * self.costs.tokens(plan), model.heads // t * model.head
        branches = 2 if model.gated else 1
        return _Arrays(
            qkv=each * (heads + 2 * self.costs.kv_heads(t) * model.head),
            heads=each * heads,
            mlp_in=each * branches * model.mlp // t,
            mlp=each * model.mlp // t,
        )

    def _width(self, split: float) -> int:
        """Bytes of an array of [tokens, width], of which a share lies split over tensor and the rest as the stream."""
        return round((1 - split) * self._stream() + split * self.costs.stream(self.plan) / self.plan.tensor)

    def _kept(self) -> int:
        """Bytes that one block hands from forward to backward, for one microbatch. none: input, both norms' results and
        the first sum; queries, keys, values, attention's output and log-sum-exp; the feed-forward layer's inside before
        and after its activation; the norms' statistics. selective: the products' and attention's results and the first
        sum beside the input. full: the input."""
        plan, stream, each = self.plan, self._stream(), self._arrays()
        if plan.recompute == "full":
            return stream
        scalars = 4 * self.costs.tokens(plan)
        inside = each.qkv + each.heads + scalars * (self.costs.model.heads // plan.tensor) + each.mlp_in
        if plan.recompute == "selective":
            return 2 * stream + inside
        return 4 * stream + inside + each.mlp + 4 * scalars

    def _inside(self, gathered: bool, accumulated: int) -> int:
        """Bytes of a block's arrays while its backward runs; of its weights, where they are gathered for it; and of its
        weights' gradients, a part at a time. A stage takes rows out of its arrays whole before: a block's weights, and
        its part of the gradients that it adds to. A split backward has one part with the arrays, and one with the
        gradients."""
        weights, element = self.costs.block_weights // self.plan.tensor, self.costs.kernels.bytes
        staged = self.plan.pipe > 1
        arrays = INSIDE[self.plan.recompute] * self._width(0.75) + (element * weights if gathered or staged else 0)
        arrays += 2 * self.costs.mask(self.plan)  # and its gradient, which cuDNN makes as well
        gradients = 4 * weights // 3 + (4 * weights // accumulated if staged else 0)
        return max(arrays, gradients) if self._rings().splits else arrays + gradients
