"""The loop that runs a schedule: a scan over ticks, each of which reads from the table what its stage does.

A tick is its slots, one after another, and then two permutes: what forwards made goes to the next stage, what
backwards made to the one before. A slot's operation runs under a conditional that is true on the stages that have it,
so that an idle slot computes nothing. Between a microbatch's forward and its backward on a stage lie values in rings,
in the places that pipeline.buffers has planned; so memory is the table's, whatever the number of microbatches.

Lookup, head with loss, and the lookup's gradient are shared by all stages, each with its part of the vocabulary: they
are meetings of all stages, under conditionals that are true on all or on none. They cost four sums of a microbatch's
activations over `pipe`: the lookup, the head's input, its gradient, and the gradient of the lookup. In return no stage
holds or computes more than 1 / stages of what is as wide as the vocabulary: in products and in parameters V / (12 D)
layers, one of GPT-3 6.7B's 32, five and a half of GPT-2 124M's 12, which would make the stage that has it the slowest
and fullest.

One stage whose every microbatch goes forward and straight backward, plain gradient accumulation, is the same loop:
where the table leaves nothing idle and nothing waits, there are no conditionals, rings and permutes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.pipeline.buffers import Plan, plan
from jaxgpt.pipeline.operations import Batch, Number, Operations, Weights
from jaxgpt.pipeline.parts import here, sent
from jaxgpt.pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHTS, Schedule
from jaxgpt.pipeline.stage import Place
from jaxgpt.sharding.collectives import after
from jaxgpt.sharding.jaxprs import share
from jaxgpt.sharding.named import varying, zeros

T = TypeVar("T")


class Waiting(NamedTuple):
    """What lies in rings between slots; first dimension: place in the ring."""

    activations: jax.Array
    """From the stage before, [places, B, S, D]."""
    gradients: jax.Array
    """From the next stage."""
    residuals: Any
    """What forwards keep for backwards."""
    splits: Any
    """What backwards' first parts keep for their second."""
    heads: jax.Array
    """The head's gradients, on their way to the last stage's backward."""


def run(schedule: Schedule, operations: Operations, gradients: Weights, batch: Batch) -> tuple[jax.Array, Weights]:
    """Runs every microbatch of batch ([microbatch, ...] each) forward and backward, as the schedule says: the sum of
    the losses, and gradients with all added."""
    loss = varying(jnp.zeros(()), axes=operations.axes)
    if _straight(schedule):

        def both(carry: tuple[jax.Array, Weights], one: Batch) -> tuple[tuple[jax.Array, Weights], None]:
            return _both(operations, *carry, one), None

        return lax.scan(both, (loss, gradients), batch)[0]
    loop = _Loop(schedule, plan(schedule), operations, batch)
    ticks = loop.rows()
    return lax.scan(loop.tick, (loss, gradients, loop.waiting()), ticks)[0][:2]


def _straight(schedule: Schedule) -> bool:
    """Whether one stage runs each microbatch, in order, forward and straight backward."""
    if schedule.stages * schedule.chunks > 1 or schedule.slots != (frozenset({FORWARD}), frozenset({BACKWARD})):
        return False
    wanted = list(range(schedule.microbatches))
    return all(schedule.microbatch[:, slot, 0].tolist() == wanted for slot in (0, 1))


def _both(ops: Operations, loss: jax.Array, gradients: Weights, batch: Batch) -> tuple[jax.Array, Weights]:
    ends = ops.ends()
    y, kept = ops.forward(0, ops.start(ends, ops.lookup(ends, batch), batch), batch)
    more, dy, dends = ops.head(ends, y, batch)
    dx, added = ops.backward(0, kept, dy, batch, gradients)
    return loss + more, ops.add(gradients | added, ops.finish(ends, dx, batch, dends))


class _Loop(NamedTuple):
    """A schedule on this device's stage."""

    schedule: Schedule
    plan: Plan
    ops: Operations
    batch: Batch

    def rows(self) -> dict[str, jax.Array]:
        """The tables, one row a tick."""
        s, p = self.schedule, self.plan
        tables = {
            "operation": s.operation,
            "microbatch": s.microbatch,
            "chunk": s.chunk,
            "residual": p.residual,
            "split": p.split,
            "take": p.take,
            "put_forward": p.put_forward,
            "put_backward": p.put_backward,
            "head": p.head,
            "head_put": p.head_put,
            "head_take": p.head_take,
            "first_forward": p.first_forward,
            "first_backward": p.first_backward,
        }
        return {name: jnp.asarray(table, jnp.int32) for name, table in tables.items()}

    def one(self, microbatch: jax.Array) -> Batch:
        """A microbatch of the batch; any where the number says none."""
        at = jnp.maximum(microbatch, 0)
        return {n: lax.dynamic_index_in_dim(a, at, keepdims=False) for n, a in self.batch.items()}

    def waiting(self) -> Waiting:
        """Empty rings."""
        plan, any_one = self.plan, self.one(jnp.int32(0))

        def shapes() -> tuple[jax.Array, Any, Any]:
            ends = self.ops.ends()
            x = self.ops.start(ends, self.ops.lookup(ends, any_one), any_one)
            y, kept = self.ops.forward(0, x, any_one)
            place = Place(jax.tree.map(lambda a: lax.expand_dims(a, (0,)), kept), jnp.int32(0))
            return x, kept, self.ops.to_input(0, place, y, any_one)[1] if plan.splits else ()

        def ring(places: int, like: Any) -> Any:
            return jax.tree.map(lambda a: self.empty(a, places), like)

        x, kept, between = jax.eval_shape(shapes)
        activations, gradients = ring(plan.inbox_forward, x), ring(plan.inbox_backward, x)
        residuals, splits = ring(plan.residuals, kept), ring(plan.splits, between)
        return Waiting(activations, gradients, residuals, splits, ring(plan.heads, x))

    def empty(self, like: Any, *lead: int) -> jax.Array:
        """Zeros of a shape and layout, with leading dimensions."""
        return varying(zeros(like, *lead), axes=self.ops.axes)

    def zeros(self, function: Callable[[], Any]) -> Any:
        """Zeros like what the function returns."""
        return jax.tree.map(self.empty, jax.eval_shape(function))

    def when(
        self,
        at: "_Slot",
        condition: jax.Array | bool,
        runs: int,
        run: Callable[[], T],
        otherwise: Callable[[], T] | None,
    ) -> T:
        """run() where the condition holds, which is so in `runs` of the ticks on any device; else otherwise(), which
        returns the like (None: zeros). The scope tells the ledger how often."""

        def typed(function: Callable[[], T], taken: int) -> Callable[[], tuple[T, jax.Array]]:
            return lambda: self._varying((function(), jnp.int32(taken)))

        ticks = len(self.schedule.operation)
        if runs == ticks:
            return typed(run, 1)()[0]
        if at.taken and self.ops.in_order:
            condition = condition & (sum(at.taken) >= 0)
        with jax.named_scope(share(runs, ticks)):
            found, taken = lax.cond(condition, typed(run, 1), typed(otherwise or (lambda: self.zeros(run)), 0))
        at.taken.append(taken)  # 1 or 0, which the compiler does not know
        return found

    def _varying(self, values: T) -> T:
        return jax.tree.map(lambda a: varying(a, axes=self.ops.axes), values)

    # One tick

    def tick(self, carry: tuple[jax.Array, Weights, Waiting], row: dict[str, jax.Array]) -> tuple[Any, None]:
        """row: the tables' rows of this tick."""
        loss, gradients, waiting = carry
        y: Any = None
        dx: Any = None
        stage = here(self.schedule.stages)
        mine = {n: lax.dynamic_index_in_dim(a, stage, -1, keepdims=False) for n, a in row.items() if n not in MEETINGS}
        ends = self.ops.ends()
        dends: Weights = {}
        taken: list[jax.Array] = []
        # a stage runs one operation in a slot, so it may read what another's branch would have written in it; of a tick
        # it sends one activation and one gradient, whichever slot they are made in
        for slot, allowed in enumerate(self.schedule.slots):
            here_now = {n: a[slot] for n, a in mine.items() if n not in ARRIVALS}
            at = _Slot(slot, here_now, {n: row[n][slot] for n in MEETINGS}, taken)
            if FORWARD in allowed:
                y, waiting = self.forward(at, ends, y, waiting)
                more, of_head, waiting = self.head(at, ends, y, waiting)
                loss, dends = loss + more, dends | {n: dends[n] + d if n in dends else d for n, d in of_head.items()}
            if BACKWARD in allowed:
                gradients, dx = self.backward(at, gradients, dx, waiting)
            if INPUT in allowed:
                dx, waiting = self.to_input(at, dx, waiting)
            if {BACKWARD, INPUT} & allowed:
                dends = self.finish(at, ends, dx, dends)
            if WEIGHTS in allowed:
                gradients = self.to_weights(at, gradients, waiting)
        if taken and self.ops.in_order:  # what else is sent after all that conditionals send
            y, dx, dends = jax.tree.map(partial(after, jnp.asarray(sum(taken))), (y, dx, dends))
        return (loss, self.ops.add(gradients, dends), self.exchange(mine, y, dx, waiting)), None

    def forward(self, at: "_Slot", ends: Weights, y: jax.Array | None, waiting: Waiting) -> tuple[jax.Array, Waiting]:
        """This stage's forward, if it has one in the slot, else y; before it, the lookup for the first part."""
        first, one = at.meeting["first_forward"], self.one(at.mine["microbatch"])
        meets = self.meetings("first_forward", at)
        looked_up = self.when(at, first >= 0, meets, lambda: self.ops.lookup(ends, self.one(first)), None)

        def run() -> tuple[jax.Array, Any]:
            x = _taken(waiting.activations, at.mine["take"])
            is_first = self.part(at) == 0
            start = partial(self.ops.start, ends, looked_up, one)
            x = lax.cond(is_first, lambda: self._varying(start()), lambda: self._varying(x))
            made, place = self.ops.forward(at.mine["chunk"], x, one, Place(waiting.residuals, at.mine["residual"]))
            return made, place.ring

        def otherwise() -> tuple[jax.Array, Any]:
            return self.empty(jax.eval_shape(run)[0]) if y is None else y, waiting.residuals

        made, residuals = self.when(at, at.mine["operation"] == FORWARD, self.turns(FORWARD, at), run, otherwise)
        return made, waiting._replace(residuals=residuals)

    def head(self, at: "_Slot", ends: Weights, y: jax.Array, waiting: Waiting) -> tuple[jax.Array, Weights, Waiting]:
        """The meeting for the microbatch whose last part has just run forward, if there is one."""
        done = at.meeting["head"]

        def run() -> tuple[jax.Array, Weights, jax.Array]:
            more, dy, dends = self.ops.head(ends, y, self.one(done))
            return more, dends, _put(waiting.heads, dy, at.meeting["head_put"])

        def otherwise() -> tuple[jax.Array, Weights, jax.Array]:
            more, dends, _ = jax.eval_shape(run)
            return self.empty(more), jax.tree.map(self.empty, dends), waiting.heads

        more, dends, heads = self.when(at, done >= 0, self.meetings("head", at), run, otherwise)
        return more, dends, waiting._replace(heads=heads)

    def arriving(self, at: "_Slot", waiting: Waiting) -> jax.Array:
        """The gradient towards a part's output: the last part's comes from the head."""
        is_last = self.part(at) == self.schedule.parts - 1
        from_head = _taken(waiting.heads, at.mine["head_take"])
        return jnp.where(is_last, from_head, _taken(waiting.gradients, at.mine["take"]))

    def backward(
        self, at: "_Slot", gradients: Weights, dx: jax.Array | None, waiting: Waiting
    ) -> tuple[Weights, jax.Array]:
        """This stage's backward, if it has one in the slot, else dx."""
        one = self.one(at.mine["microbatch"])

        def run() -> tuple[jax.Array, Weights]:
            kept = Place(waiting.residuals, at.mine["residual"])
            return self.ops.backward(at.mine["chunk"], kept, self.arriving(at, waiting), one, gradients)

        def otherwise() -> tuple[jax.Array, Weights]:
            like, added = jax.eval_shape(run)
            return self.empty(like) if dx is None else dx, {n: gradients[n] for n in added}

        made, added = self.when(at, at.mine["operation"] == BACKWARD, self.turns(BACKWARD, at), run, otherwise)
        return gradients | added, made

    def to_input(self, at: "_Slot", dx: jax.Array | None, waiting: Waiting) -> tuple[jax.Array, Waiting]:
        """The first part of this stage's backward, if it has one in the slot, else dx."""
        one = self.one(at.mine["microbatch"])

        def run() -> tuple[jax.Array, Any]:
            kept, into = Place(waiting.residuals, at.mine["residual"]), Place(waiting.splits, at.mine["split"])
            made, place = self.ops.to_input(at.mine["chunk"], kept, self.arriving(at, waiting), one, into)
            return made, place.ring

        def otherwise() -> tuple[jax.Array, Any]:
            return self.empty(jax.eval_shape(run)[0]) if dx is None else dx, waiting.splits

        made, splits = self.when(at, at.mine["operation"] == INPUT, self.turns(INPUT, at), run, otherwise)
        return made, waiting._replace(splits=splits)

    def to_weights(self, at: "_Slot", gradients: Weights, waiting: Waiting) -> Weights:
        """The second part of this stage's backward, if it has one in the slot."""
        one = self.one(at.mine["microbatch"])

        def run() -> Weights:
            kept, between = Place(waiting.residuals, at.mine["residual"]), Place(waiting.splits, at.mine["split"])
            return self.ops.to_weights(at.mine["chunk"], kept, between, one, gradients)

        def otherwise() -> Weights:
            return {n: gradients[n] for n in jax.eval_shape(run)}

        return gradients | self.when(at, at.mine["operation"] == WEIGHTS, self.turns(WEIGHTS, at), run, otherwise)

    def finish(self, at: "_Slot", ends: Weights, dx: jax.Array, dends: Weights) -> Weights:
        """The meeting for the microbatch whose first part has just run backward, if there is one."""
        first = at.meeting["first_backward"]

        def run() -> Weights:
            return self.ops.finish(ends, dx, self.one(first), dends)

        def otherwise() -> Weights:
            return self.zeros(run) | dends

        return self.when(at, first >= 0, self.meetings("first_backward", at), run, otherwise)

    def exchange(self, mine: dict[str, jax.Array], y: jax.Array, dx: jax.Array, waiting: Waiting) -> Waiting:
        """Sends a tick's results to the neighbours, and lays what comes into its place."""
        stages, wraps = self.schedule.stages, self.schedule.chunks > 1
        if stages == 1:
            onward, back = y, dx
        else:
            pairs = [(s, (s + 1) % stages) for s in range(stages if wraps else stages - 1)]
            onward = sent(y, pairs)
            back = sent(dx, [(b, a) for a, b in pairs])
        return waiting._replace(
            activations=_put(waiting.activations, onward, mine["put_forward"]),
            gradients=_put(waiting.gradients, back, mine["put_backward"]),
        )

    def part(self, at: "_Slot") -> Number:
        """Which part of the model this stage runs in the slot."""
        stage = here(self.schedule.stages)
        return at.mine["chunk"] * self.schedule.stages + stage

    def meetings(self, meeting: str, at: "_Slot") -> int:
        """How many ticks have this meeting in this slot."""
        return int((getattr(self.plan, meeting)[:, at.number] >= 0).sum())

    def turns(self, operation: int, at: "_Slot") -> int:
        """In how many ticks a stage runs the operation in this slot: the same for all stages."""
        return int((self.schedule.operation[:, at.number] == operation).sum(0).max())


class _Slot(NamedTuple):
    """A slot's entries of the tables in one tick: this stage's, and those of the meetings of all."""

    number: int
    mine: dict[str, jax.Array]
    meeting: dict[str, jax.Array]
    taken: list[jax.Array]
    """Of each conditional of the tick so far, 1 or 0."""


MEETINGS = ("head", "head_put", "first_forward", "first_backward")
ARRIVALS = ("put_forward", "put_backward")


def _taken(ring: Any, place: jax.Array) -> Any:
    return jax.tree.map(lambda r: lax.dynamic_index_in_dim(r, place, keepdims=False), ring)


def _put(ring: Any, value: Any, place: jax.Array) -> Any:
    return jax.tree.map(lambda r, v: lax.dynamic_update_index_in_dim(r, v, place, 0), ring, value)
