"""What the pipeline's loop does with a microbatch, for a GPT: lookup, blocks, head with loss, and their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.config import ModelConfig
from jaxgpt.model.gpt import Context, context, embed, final_norm
from jaxgpt.model.vocabulary import add_lookup_gradient, lookup, loss_and_gradients
from jaxgpt.pipeline.groups import Grouped
from jaxgpt.pipeline.operations import Number
from jaxgpt.pipeline.parts import from_stage, only, rows_of
from jaxgpt.pipeline.placement import Placement
from jaxgpt.pipeline.stage import Place, Rows, Stage
from jaxgpt.sharding.collectives import scatter_sum
from jaxgpt.sharding.named import varying
from jaxgpt.sharding.ring import positions

Arrays = dict[str, jax.Array]
BLOCKS = "blocks."
TOKEN, HEAD = "embedding.token.weight", "head.weight"


class Microbatch(NamedTuple):
    """pipeline.loop.Operations of one step, on one device."""

    model: ModelConfig
    stage: Stage | Grouped
    placement: Placement
    axes: tuple[str, ...]
    weights: Arrays
    """As they lie between their uses."""
    gathered: Callable[[], Arrays]
    """Makes the ends whole over fsdp."""
    dims: dict[str, tuple[str, ...]]
    accumulated: tuple[str, ...]
    """Axes over which accumulated gradients lie split."""
    scale: jax.Array
    """Of the loss' gradient: 1 / valid tokens of the global batch."""
    key: jax.Array
    in_order: bool

    @property
    def table(self) -> str:
        """The table that the head multiplies with."""
        return head_table(self.model)

    def context(self, batch: Arrays) -> Context:
        places = positions(batch["inputs"].shape[1])
        return context(self.model, batch["samples"], places, self.key, batch.get("starts"))

    def only(self, number: int, x: jax.Array) -> jax.Array:
        """x as that stage has it, zero on the others: what is to be counted once."""
        return only(self.placement, number, x)

    def _everywhere(self, number: int, x: jax.Array) -> jax.Array:
        # the barrier keeps XLA from gathering over tensor first, and then summing what is larger
        return varying(lax.optimization_barrier(from_stage(self.placement, number, x)), axes=self.axes)

    # The ends

    def ends(self) -> Arrays:
        return self.gathered()

    def lookup(self, ends: Arrays, batch: Arrays) -> jax.Array:
        return varying(lookup(ends[TOKEN], batch["inputs"]), axes=self.axes)

    def start(self, ends: Arrays, looked_up: jax.Array, batch: Arrays) -> jax.Array:
        return embed(self.model, part(ends, "embedding."), looked_up, self.context(batch))

    def head(self, ends: Arrays, y: jax.Array, batch: Arrays) -> tuple[jax.Array, jax.Array, Arrays]:
        last = self.placement.stages - 1
        norms = {n: w for n, w in ends.items() if n.startswith("final_norm.")}
        h, normed = jax.vjp(partial(final_norm, self.model), norms, self._everywhere(last, y))
        loss, dh, dtable = loss_and_gradients(h, ends[self.table], batch["targets"], self.scale, self.model.vocab)
        dnorms, dy = normed(varying(dh, h))
        dends = {n: self.only(last, d) for n, d in dnorms.items()} | {self.table: dtable}
        return self.only(last, varying(loss, axes=self.axes)), dy, dends

    def finish(self, ends: Arrays, dx: jax.Array, batch: Arrays, dends: Arrays) -> Arrays:
        dx = self._everywhere(0, dx)
        places = {n: w for n, w in part(ends, "embedding.").items() if n.startswith("position.")}
        c = self.context(batch)
        _, embedded = jax.vjp(lambda w, x: embed(self.model, w, x, c), places, jnp.zeros_like(dx))
        dplaces, dx = embedded(dx)
        table = dends[TOKEN] if TOKEN in dends else jnp.zeros_like(ends[TOKEN], dtype=jnp.float32)
        with_lookup = add_lookup_gradient(varying(table, axes=self.axes), batch["inputs"], dx)
        of_places = {f"embedding.{n}": self.only(0, d) for n, d in dplaces.items()}
        of_places = {n: dends[n] + d if n in dends else d for n, d in of_places.items()}
        return dends | of_places | {TOKEN: with_lookup}

    def add(self, gradients: Arrays, dends: Arrays) -> Arrays:
        return gradients | {n: gradients[n] + scatter_sum(d, self.dims[n], self.accumulated) for n, d in dends.items()}

    # The blocks of one part

    def forward(self, chunk: Number, x: jax.Array, batch: Arrays, into: Place | None = None) -> tuple[jax.Array, Any]:
        return self.stage.forward(self._blocks, x, self._rows(chunk), self.context(batch), into)

    def backward(
        self, chunk: Number, kept: Any, dy: jax.Array, batch: Arrays, gradients: Arrays
    ) -> tuple[jax.Array, Arrays]:
        accumulated = part(gradients, BLOCKS)
        rows, c = self._rows(chunk), self.context(batch)
        dx, added = self.stage.backward(self._blocks, kept, dy, rows, c, accumulated)
        return dx, _blocks(added)

    def to_input(
        self, chunk: Number, kept: Place, dy: jax.Array, batch: Arrays, into: Place | None = None
    ) -> tuple[jax.Array, Any]:
        return self.stage.to_input(self._blocks, kept, dy, self._rows(chunk), self.context(batch), into)

    def to_weights(self, chunk: Number, kept: Place, between: Place, batch: Arrays, gradients: Arrays) -> Arrays:
        accumulated = part(gradients, BLOCKS)
        rows, c = self._rows(chunk), self.context(batch)
        return _blocks(self.stage.to_weights(self._blocks, kept, between, rows, c, accumulated))

    @property
    def _blocks(self) -> Arrays:
        return part(self.weights, BLOCKS)

    def _rows(self, chunk: Number) -> Rows:
        return rows_of(self.placement, chunk)


def _blocks(arrays: Arrays) -> Arrays:
    return {BLOCKS + n: a for n, a in arrays.items()}


def head_table(model: ModelConfig) -> str:
    """Name of the table that the head multiplies with."""
    return TOKEN if model.tied else HEAD


def part(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, under the rest of their names."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
