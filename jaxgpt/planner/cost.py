"""What a block and the ends of a model take on one device of a mesh: computation and communication of a microbatch.

Every term is a shape's work: products and attention by planner.kernels, element-wise work by bytes, collectives by the
bytes of the arrays that change their signature (sharding.boxing) and planner.links. How often each happens is the
program's way (planner.practice); for jaxgpt these counts are those of its traced step (sharding.ledger), which the
tests hold them against.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from jaxgpt.config import ModelConfig
from jaxgpt.planner import flops
from jaxgpt.planner.hardware import Dtype, Hardware
from jaxgpt.planner.kernels import Kernels
from jaxgpt.planner.links import Group
from jaxgpt.planner.plan import Plan
from jaxgpt.planner.practice import Practice
from jaxgpt.recomputation import Kind

FORWARD_KERNELS = 16
"""Kernels of a block's forward, about; its backward has twice as many."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of the fused attention's backward over its forward's: five products for two, as the scores are made again."""
CONTENTION = 0.15
"""Share of a hidden collective's time by which it holds up what it hides under: the multiprocessors that it takes, 16
to 32 channels of NCCL on 108 to 132 of them."""
ENDS_PASSES = 12
"""Passes over the stream by lookup, final norm, and their backwards."""


@dataclass(frozen=True)
class Work:
    """Seconds of computation, for one microbatch on one device. attention: the part of forward that is attention's."""

    forward: float
    to_input: float
    """Of the backward, towards the input; with element-wise work."""
    to_weights: float
    attention: float
    down: float
    """Of forward, the last product's ..."""
    pointwise: float
    """... and element-wise work's."""

    @property
    def backward(self) -> float:
        return self.to_input + self.to_weights

    def again(self, recompute: Kind, practice: Practice) -> float:
        """What recomputation adds to the backward."""
        if recompute == "none":
            return 0.0
        if recompute == "selective":
            return self.attention if practice.repeats_attention else self.pointwise
        return self.forward if practice.repeats_all else self.forward - self.down


@dataclass(frozen=True)
class Costs:
    """Of one model on one kind of device, as one program does it."""

    model: ModelConfig
    hardware: Hardware
    practice: Practice
    dtype: Dtype

    @functools.cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.hardware, self.dtype)

    @functools.cached_property
    def _blocks(self) -> dict[tuple[int, ...], Work]:
        return {}

    @functools.cached_property
    def _ends(self) -> dict[tuple[int, ...], float]:
        return {}

    @functools.cached_property
    def groups(self) -> dict[tuple[object, ...], Group]:
        """Those of planner.links that were asked for, by axes and mesh."""
        return {}

    # Shapes

    @functools.cached_property
    def block_weights(self) -> int:
        """Entries of a block's matrices; vectors are left out, being a thousandth."""
        model = self.model
        attention = model.width * model.head * 2 * (model.heads + model.kv)
        return attention + (3 if model.gated else 2) * model.width * model.mlp

    @functools.cached_property
    def tables(self) -> int:
        """Entries of the tables as wide as the vocabulary, the head's among them where it is not the embedding."""
        return self.model.padded_vocab * self.model.width * (1 if self.model.tied else 2)

    @functools.cached_property
    def flops_per_token(self) -> float:
        """The model's (planner.flops)."""
        return flops.flops_per_token(self.model)

    @functools.cached_property
    def places(self) -> int:
        """Entries of the table of positions, which lies split over no axis but those of `embed`."""
        return self.model.seq * self.model.width if self.model.positions == "learned" else 0

    def kv_heads(self, tensor: int) -> int:
        """On one device: at least one."""
        return max(self.model.kv, tensor) // tensor

    def tokens(self, plan: Plan) -> int:
        """Of a microbatch on one device."""
        return plan.micro_batch * self.model.seq // plan.context

    def stream(self, plan: Plan) -> int:
        """Bytes of a microbatch's residual stream, whole over tensor."""
        return self.kernels.bytes * self.tokens(plan) * self.model.width

    def mask(self, plan: Plan) -> int:
        """Bytes of the mask that attention is given at once, one for all heads; 0 where it is given none."""
        queries = self.model.seq // plan.context
        return self.kernels.bytes * plan.micro_batch * queries * queries if self.practice.masked else 0

    # Computation

    def block(self, plan: Plan) -> Work:
        """Of one block."""
        key = (plan.tensor, plan.context, plan.micro_batch, plan.sequence_parallel)
        if key not in self._blocks:
            self._blocks[key] = self._block(plan)
        return self._blocks[key]

    def _block(self, plan: Plan) -> Work:
        model, t, tokens, product = self.model, plan.tensor, self.tokens(plan), self.kernels.product
        heads, branches = model.heads // t, 2 if model.gated else 1
        shapes = [  # inner dimension, outer
            (model.width, (heads + 2 * self.kv_heads(t)) * model.head),
            (heads * model.head, model.width),
            (model.width, branches * model.mlp // t),
            (model.mlp // t, model.width),
        ]
        forward, back = self._attention(plan)
        stream = self.stream(plan) // (t if plan.sequence_parallel else 1)
        inside = self.kernels.bytes * tokens * branches * model.mlp // (4 * t)
        gaps = FORWARD_KERNELS * self.hardware.gap
        ways = self.practice
        added = self.kernels.passes(ways.accumulate_bytes * self.block_weights / t)
        pointwise = self.kernels.passes(ways.forward.stream * stream + ways.forward.inside * inside)
        return Work(
            forward=sum(product(tokens, n, k) for k, n in shapes) + forward + pointwise + gaps,
            to_input=sum(product(tokens, k, n) for k, n in shapes)
            + back
            + self.kernels.passes(ways.backward.stream * stream + ways.backward.inside * inside)
            + 2 * gaps,
            to_weights=sum(product(k, n, tokens) for k, n in shapes) + added,
            attention=forward,
            down=product(tokens, model.width, model.mlp // t),
            pointwise=pointwise,
        )

    def _attention(self, plan: Plan) -> tuple[float, float]:
        """Forward and backward of attention's inside."""
        model, product, ways = self.model, self.kernels.product, self.practice
        heads = plan.micro_batch * model.heads // plan.tensor
        queries, width = model.seq // plan.context, model.head
        if ways.fused_attention:
            computed = 4.0 * heads * width * queries * flops.keys(model)
            forward = self.kernels.attention(computed, width)
            # a mask is written once, and read by each head up to the diagonal; backward that twice, and its gradient;
            # over context there is one for each half of another device's keys, too
            masks, read = self.mask(plan) * (plan.context + 1) / 2, model.heads / plan.tensor / 2
            made, again = (self.kernels.passes(masks * passes) for passes in (1 + read, 2 + 2 * read))
            return forward + made, BACKWARD_ATTENTION * forward + again
        scores = self.kernels.bytes * heads * queries * model.seq
        make, use = product(queries, model.seq, width, heads), product(queries, width, model.seq, heads)
        passes = self.kernels.passes
        forward = make + use + passes(ways.forward.scores * scores)
        return forward, make + 3 * use + passes(ways.backward.scores * scores)

    def ends(self, plan: Plan) -> float:
        """Lookup, head with loss, and their backwards: on each stage its share, or all on the stage that has them."""
        parts = plan.tensor * (plan.pipe if self.practice.shared_ends else 1)
        key = (parts, self.tokens(plan))
        if key not in self._ends:
            tokens, width, rows = self.tokens(plan), self.model.width, self.model.padded_vocab // parts
            product, passes = self.kernels.product, self.kernels.passes
            products = product(tokens, rows, width) + product(tokens, width, rows) + product(rows, width, tokens)
            moved = self.practice.logit_bytes * tokens * rows + ENDS_PASSES * self.stream(plan)
            added = self.practice.accumulate_bytes * rows * width
            self._ends[key] = products + passes(moved + added) + 2 * FORWARD_KERNELS * self.hardware.gap
        return self._ends[key]


@functools.lru_cache(maxsize=256)
def costs(model: ModelConfig, hardware: Hardware, practice: Practice, dtype: Dtype) -> Costs:
    """One Costs for each model, device and program, with what it has worked out already."""
    return Costs(model, hardware, practice, dtype)


# Communication


@dataclass(frozen=True)
class Sent:
    """Seconds of communication during which nothing is computed, by axis, of one block and microbatch."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    """Recomputation's included."""


def seen(seconds: float, window: float) -> float:
    """What is seen of a collective that can hide for so long."""
    hidden = min(seconds, window)
    return seconds - hidden + CONTENTION * hidden


def over_tensor(costs: Costs, plan: Plan, group: Group, recompute: Kind) -> tuple[float, float]:
    """A block's exposed communication over tensor, forward and backward, by Megatron's splits: a sum of the stream
    after each pair of products (arXiv 1909.08053); with sequence parallelism a gather and a scattering sum in its
    place, and a gather more for the weights' gradients (arXiv 2205.05198)."""
    ways, stream, full = costs.practice, costs.stream(plan), recompute == "full"
    if plan.sequence_parallel:
        again = (4 if ways.repeats_all else 1) if full else 0
        each, forward, backward = group.all_gather(stream), 4, 6 + again
    else:
        again = (2 if ways.repeats_all else 1) if full else 0
        each, forward, backward = group.all_reduce(stream), 2, 2 + again
    share = seen(1.0, ways.hidden_tensor)
    return share * forward * each, share * backward * each


def over_context(costs: Costs, plan: Plan, group: Group, work: Work, recompute: Kind) -> tuple[float, float]:
    """A block's exposed communication over context: keys and values round a ring, or gathered. Backward, keys and
    values again, and their gradients in fp32. A ring's messages can hide under attention, turn by turn."""
    n = plan.context
    kv = 2 * costs.kernels.bytes * costs.tokens(plan) * costs.kv_heads(plan.tensor) * costs.model.head
    edges = 4 * costs.tokens(plan) if costs.practice.masked else 0
    if plan.context_attention == "gather":
        gathered = group.all_gather(n * (kv + edges))
        return gathered, gathered + group.reduce_scatter(2 * n * kv)
    turn, forward = group.permute(kv), (n - 1) * group.permute(kv + edges)
    again = forward if recompute == "full" else 0.0
    backward = again + forward + (2 * (n - 1) + 1) * turn
    hidden = costs.practice.hidden_weights * work.attention
    return seen(forward, hidden), seen(backward, BACKWARD_ATTENTION * hidden)


def over_weights(costs: Costs, plan: Plan, used: Group, accumulated: Group, work: Work) -> tuple[float, float]:
    """A block's exposed gathers of its weights, forward and backward, and scattering sums of its gradients, where these
    lie split between uses and while they are accumulated (FSDP, ZeRO 2 and 3; arXiv 1910.02054). Part of it hides under
    the block's own computation, but where one processor does both."""
    gathered, reduced = reordered(costs, costs.block_weights / plan.tensor, used, accumulated)
    hidden = 0.0 if costs.hardware.shared else costs.practice.hidden_weights
    return seen(gathered, hidden * work.forward), seen(gathered + reduced, hidden * work.backward)


def reordered(costs: Costs, weights: float, used: Group, accumulated: Group) -> tuple[float, float]:
    """A gather of weights, so many entries in all, and a scattering sum of their gradients. Devices that are one
    processor's also copy them, from the order in which they come to that in which they lie, or back."""
    whole, gradients = costs.kernels.bytes * weights, costs.practice.gradient_bytes * weights
    copied = (costs.kernels.passes(2 * n) if costs.hardware.shared else 0.0 for n in (whole, gradients))
    sent = used.all_gather(whole), accumulated.reduce_scatter(gradients)
    gathered, reduced = (seconds + more for seconds, more in zip(sent, copied, strict=True))
    return gathered, reduced
