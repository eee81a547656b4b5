"""Memory of a plan: what the compiled step holds on the fullest device at its peak, by kind.

State and gradients are counted from the table of parameters and the layout, activations from the arrays that a block
hands from forward to backward, times the places that the schedule's table needs for them. What the compiler holds
beside is counted as what the program visibly makes: a block's inside, a stage's activations on their way into and out of
their ring, a chunk of logits, gathered weights.
"""

from dataclasses import dataclass

from jaxgpt.planner.cost import Costs
from jaxgpt.planner.hardware import Hardware
from jaxgpt.planner.plan import Memory, Plan
from jaxgpt.planner.practice import Held
from jaxgpt.planner.ticks import rings

MARGIN = 0.15
"""By how much a compiled program may need more than is predicted; `fits` allows for it."""
CHUNK_LOGITS = 2**25
"""Logits held at once (model.vocabulary)."""


def fits(peak: int, hardware: Hardware) -> bool:
    """Whether a peak, MARGIN above what is predicted, is within the device's memory."""
    return peak * (1 + MARGIN) <= hardware.memory


def peak_memory(costs: Costs, plan: Plan, global_batch: int) -> Memory:
    """Of a legal plan, bytes on the fullest device."""
    held = costs.practice.held
    if held is not None:
        return _other(costs, plan, held)
    return _Compiled(costs, plan, plan.microbatches(global_batch)).memory()


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
    kept = {"full": boundary, "selective": inside, "none": inside + scores}[plan.recompute]
    again = {"full": inside + scores, "selective": scores, "none": 0}[plan.recompute]
    microbatches = p + (p - 1) / v if v > 1 else held.microbatches(p)
    logits = held.logit * tokens * model.padded_vocab // t
    return Memory(
        parameters=2 * entries,
        gradients=(state - 2) * entries,
        optimizer=moments,
        activations=round(kept * blocks * microbatches),
        logits=max(0, logits - again),
        buffers=again + held.overhead + (held.communication if plan.devices > 1 else 0),
    )


# jaxgpt


@dataclass(frozen=True)
class _Compiled:
    costs: Costs
    plan: Plan
    microbatches: int

    def memory(self) -> Memory:
        plan, costs = self.plan, self.costs
        blocks, tables = self._entries()
        rest = (blocks + tables) // (plan.fsdp * (plan.data if plan.zero else 1))
        accumulated = (blocks + tables) // (plan.fsdp * (plan.data if plan.zero >= 2 else 1))
        used = (blocks + tables) // (plan.fsdp * (plan.data if plan.zero == 3 else 1))
        kept, rows = self._kept(), self._rows()
        places = rings(plan.schedule, plan.pipe, self.microbatches, plan.virtual_stages)
        stream = costs.stream(plan) // (plan.tensor if plan.sequence_parallel else 1)
        chunk = min(costs.tokens(plan), max(1, CHUNK_LOGITS // self._vocab()))
        messages = (places.inbox_forward + places.inbox_backward + places.heads) * stream
        working = 2 * self._inside() + 6 * costs.block_weights // plan.tensor
        return Memory(
            parameters=4 * rest + costs.kernels.bytes * used,
            gradients=4 * accumulated,
            optimizer=8 * rest,
            activations=rows * kept * (1 if plan.pipe == 1 else places.residuals + 2),
            logits=10 * chunk * self._vocab() + 8 * self._vocab() * costs.model.width,
            buffers=working + messages + 8 * self.microbatches * costs.tokens(plan),
        )

    def _vocab(self) -> int:
        return self.costs.model.padded_vocab // (self.plan.tensor * self.plan.pipe)

    def _rows(self) -> int:
        """Blocks of a part."""
        if self.plan.stages != "auto":
            return max(int(each) for each in self.plan.stages.split(","))
        return -(-self.costs.model.layers // (self.plan.pipe * self.plan.virtual_stages))

    def _entries(self) -> tuple[int, int]:
        """Of blocks and tables on one device, before FSDP and ZeRO."""
        plan, costs = self.plan, self.costs
        blocks = self._rows() * plan.virtual_stages * costs.block_weights // plan.tensor
        return blocks, costs.tables // (plan.tensor * plan.pipe)

    def _kept(self) -> int:
        """Bytes that one block hands from forward to backward, for one microbatch."""
        plan, costs, model = self.plan, self.costs, self.costs.model
        element, tokens, t = costs.kernels.bytes, costs.tokens(plan), plan.tensor
        stream = element * tokens * model.width // (t if plan.sequence_parallel else 1)
        if plan.recompute == "full":
            return stream
        qkv = (model.heads // t + 2 * costs.kv_heads(t)) * model.head
        out, branches = model.heads // t * model.head, 2 if model.gated else 1
        inside = qkv + out + branches * model.mlp // t
        if plan.recompute == "selective":
            return 2 * stream + element * tokens * inside
        return 5 * stream + element * tokens * (inside + model.mlp // t)

    def _inside(self) -> int:
        """Bytes of a block's arrays while its backward runs, about."""
        plan, costs, model = self.plan, self.costs, self.costs.model
        return 5 * costs.stream(plan) + costs.kernels.bytes * costs.tokens(plan) * 3 * model.mlp // plan.tensor
