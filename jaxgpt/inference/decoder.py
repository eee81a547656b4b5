"""The model with a cache on a mesh: one program that reads some tokens, called with a chunk of a prompt or with one.

The cache lies as the model does: layers on `pipe`, heads on `tensor`, and the batch on all other axes, `context` too:
one token has no sequence to split. Letters: B batch, C tokens at once, M key-value heads, L slots, K head width, V
padded vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import ModelConfig
from jaxgpt.inference.cache import CachedAttention
from jaxgpt.model.elementwise import rope_frequencies
from jaxgpt.model.gpt import RESIDUAL, Context, block, final_norm
from jaxgpt.model.vocabulary import head_logits, lookup
from jaxgpt.pipeline.parts import from_stage, here, rows_of, sent
from jaxgpt.sharding.collectives import gather
from jaxgpt.sharding.hosts import put
from jaxgpt.sharding.named import relayout, varying
from jaxgpt.sharding.rows import MANUAL, TENSOR
from jaxgpt.training.microbatch import BLOCKS, TOKEN, part
from jaxgpt.training.step import Arrays, Step, on_mesh, state_specs

Group = tuple[jax.Array, jax.Array]
Cache = list[Group]
"""Keys and values of each group of layers, [layers, B, M, L, K]; of a layer alone, [B, M, L, K]."""
Weights = tuple[Arrays, list[Arrays]]
"""Embedding, final norm and head; and the blocks, in groups of layers."""
POSITION = "embedding.position.weight"


@dataclass(frozen=True)
class Decoder:
    """The programs of a step's model. Nothing is compiled before it is first used."""

    trained: Step
    mesh: Mesh

    @cached_property
    def step(self) -> Step:
        """The step with neither dropout nor a split of the residual stream's sequence."""
        config = self.trained.config
        rows = [row for row in config.layout.split(",") if not row.strip().startswith("seq")]
        model = replace(config.model, dropout=0.0)
        return replace(
            self.trained, config=replace(config, model=model, layout=",".join(rows), sequence_parallel=False)
        )

    @property
    def model(self) -> ModelConfig:
        return self.step.model

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the rows of a batch lie split."""
        return tuple(axis for axis in MANUAL if axis != "pipe" and self.step.sizes[axis] > 1)

    @property
    def rows(self) -> int:
        """What the number of rows must be a multiple of."""
        return math.prod(self.step.sizes[axis] for axis in self.batch_axes)

    @property
    def _batch(self) -> tuple[str, ...] | None:
        return self.batch_axes or None

    @property
    def _pipe(self) -> str | None:
        return "pipe" if self.step.sizes["pipe"] > 1 else None

    @cached_property
    def groups(self) -> list[int]:
        """Layers of each group on a device. On CPU a layer is a group of its own: a loop over stacked weights would
        copy each layer's out of the stack, at every token."""
        placement = self.step.placement
        if placement.stages > 1:
            return [placement.longest] * placement.chunks
        return [1] * placement.layers if self._alone else [placement.layers]

    @cached_property
    def _alone(self) -> bool:
        """Whether each layer is a group of its own."""
        return self.step.placement.stages == 1 and self.mesh.devices.flat[0].platform == "cpu"

    def _on_mesh(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        return on_mesh(self.step, self.mesh, function, inputs, outputs, split_sequence=False)

    # Weights

    @cached_property
    def _weight_specs(self) -> tuple[dict[str, PartitionSpec], list[dict[str, PartitionSpec]]]:
        specs = {n: self.step.layout.manual(d) for n, d in self.step.dims.items()}
        blocks = {n.removeprefix(BLOCKS): s for n, s in specs.items() if n.startswith(BLOCKS)}
        return {n: s for n, s in specs.items() if not n.startswith(BLOCKS)}, [blocks] * len(self.groups)

    @cached_property
    def prepare(self) -> Any:
        """(params) -> weights as they are computed with: fused, in the type of computation, in groups of layers."""
        params = state_specs(self.step)["params"]
        return jax.jit(self._on_mesh(self._prepared, (params,), self._weight_specs))

    def _prepared(self, params: Arrays) -> Weights:
        cast = self.step.cast(params)
        blocks, first, groups = part(cast, BLOCKS), 0, []
        for size in self.groups:
            groups.append({n: lax.slice_in_dim(w, first, first + size) for n, w in blocks.items()})
            first += size
        return {n: w for n, w in cast.items() if not n.startswith(BLOCKS)}, groups

    def _whole(self, weights: Arrays, lead: str) -> Arrays:
        """Weights of a block, or of the ends, gathered over the axes that split them at rest. lead: of their names."""
        axes, skip = self.step.layout.rows.rest, 1 if lead else 0
        return {n: gather(w, self.step.dims[lead + n][skip:], axes) for n, w in weights.items()}

    # The cache

    @cached_property
    def _cache_specs(self) -> list[tuple[PartitionSpec, PartitionSpec]]:
        manual = PartitionSpec(*self._lead(self._pipe), self._batch, None, None, None)
        return [(manual, manual)] * len(self.groups)

    def _lead(self, stacked: Any) -> tuple[Any, ...]:
        """What a cache has before its batch. A layer alone has no dimension for it: with one, XLA on CPU copies the
        whole cache several times a token, since it writes to it under two shapes."""
        return () if self._alone else (stacked,)

    def new_cache(self, rows: int, slots: int) -> Cache:
        """An empty cache, on the devices."""
        split = TENSOR if TENSOR in self.step.layout.rows.activations["kv_heads"] else None
        where = NamedSharding(self.mesh, PartitionSpec(*self._lead(self._pipe), self._batch, split, None, None))
        stages, rest = self.step.placement.stages, (rows, self.step.layout.kv_heads, slots, self.model.head)

        def zeros(size: int) -> jax.Array:
            return jnp.zeros((*self._lead(size * stages), *rest), self.step.dtype, device=where)

        return [(zeros(size), zeros(size)) for size in self.groups]

    # Tokens

    @cached_property
    def extend(self) -> Any:
        """(weights, cache, tokens [B, C], slot, starts [B]) -> fp32 logits [B, V] of what follows the last token, whole
        on every device; and the cache, which is given up, with the tokens in it from `slot` on.

        starts: first slot of each row's text; what is written before it is never seen.
        """
        return jax.jit(self._extend, donate_argnums=1)

    @cached_property
    def follow(self) -> Any:
        """As extend, but gives the likeliest of the next tokens, [B, 1], which may be read in their turn: so the host
        need not wait for one token before it asks for the next."""

        def follow(*args: Any) -> tuple[jax.Array, Cache]:
            logits, cache = self._extend(*args)
            return self._likeliest(logits), cache

        return jax.jit(follow, donate_argnums=1)

    @cached_property
    def likeliest(self) -> Any:
        """(logits [B, V]) -> the likeliest tokens, [B, 1], as extend takes them; of several the first."""
        return jax.jit(self._likeliest)

    def _likeliest(self, logits: jax.Array) -> jax.Array:
        # a maximum and its first place: XLA on CPU computes both many numbers at a time, and an argmax one by one
        highest = jnp.max(logits, -1, keepdims=True)
        places = jnp.where(logits == highest, jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape[-1] - 1)
        return jax.reshard(jnp.min(places, -1, keepdims=True), NamedSharding(self.mesh, PartitionSpec(self._batch)))

    @cached_property
    def _extend(self) -> Callable[..., tuple[jax.Array, Cache]]:
        batch, whole = PartitionSpec(self._batch), PartitionSpec()
        inputs = (self._weight_specs, self._cache_specs, batch, whole, batch)
        outputs = (PartitionSpec(self._batch, self.step.layout.shared().get("vocab")), self._cache_specs)
        inside = self._on_mesh(self._extended, inputs, outputs)

        def extend(*args: Any) -> tuple[jax.Array, Cache]:
            logits, cache = inside(*args)
            return jax.reshard(logits, NamedSharding(self.mesh, whole)), cache

        return extend

    def place(self, tokens: np.ndarray) -> jax.Array:
        """Tokens [B, C], or anything of each row, on the devices."""
        return put(tokens, NamedSharding(self.mesh, PartitionSpec(self._batch)))

    def _extended(
        self, weights: Weights, cache: Cache, tokens: jax.Array, slot: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, Cache]:
        ends, groups = self._whole(weights[0], ""), weights[1]
        positions = jnp.maximum(slot + jnp.arange(tokens.shape[1]) - starts[:, None], 0)
        c = self._context(positions)
        x = lookup(ends[TOKEN], tokens)
        if self.model.positions == "learned":
            x = x + relayout(ends[POSITION].at[positions].get(mode="clip"), RESIDUAL)
        blocks = self._staged if self.step.placement.stages > 1 else self._in_turn
        x, cache = blocks(groups, cache, x, c, slot, starts)
        last = final_norm(self.model, ends, x[:, -1:])
        return head_logits(last, ends[self.step.head], self.model.vocab)[:, 0], cache

    def _context(self, positions: jax.Array) -> Context:
        """Rotary tables, each row's own; what dropout would draw from is left empty."""
        rows, length = positions.shape
        empty = Context(jnp.zeros(rows, jnp.int32), jnp.arange(length), jnp.zeros(2, jnp.uint32), None, None)
        if self.model.positions != "rotary":
            return empty
        frequencies = rope_frequencies(self.model.rotated, self.model.rope_base, self.model.rope_scaling)
        angles = positions[..., None] * frequencies
        return empty._replace(cos=jnp.cos(angles), sin=jnp.sin(angles))

    def _in_turn(
        self, groups: list[Arrays], cache: Cache, x: jax.Array, c: Context, slot: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """All groups, one after another."""
        written, first = [], 0
        for weights, kept, size in zip(groups, cache, self.groups, strict=True):
            x, group = self._group(weights, kept, jnp.arange(first, first + size), c, slot, starts, x)
            written.append(group)
            first += size
        return x, written

    def _staged(
        self, groups: list[Arrays], cache: Cache, x: jax.Array, c: Context, slot: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Part after part, each on its stage, as pipeline.parts.through has it; the result on all stages."""
        placement, written = self.step.placement, list(cache)
        ring = [(stage, (stage + 1) % placement.stages) for stage in range(placement.stages)]
        x = varying(x, axes=("pipe",))
        for number in range(len(placement.parts)):
            chunk = number // placement.stages
            layers = rows_of(placement, chunk).layers
            run = partial(self._group, groups[chunk], written[chunk], layers, c, slot, starts)
            mine = number % placement.stages == here(placement.stages)
            x, written[chunk] = lax.cond(mine, run, lambda x, kept=written[chunk]: (x, kept), x)
            x = sent(x, ring)
        return from_stage(placement, 0, x), written

    def _group(
        self,
        weights: Arrays,
        cache: Group,
        layers: jax.Array,
        c: Context,
        slot: jax.Array,
        starts: jax.Array,
        x: jax.Array,
    ) -> tuple[jax.Array, Group]:
        """The layers of a group, each with its cache."""

        def one(x: jax.Array, each: tuple[Arrays, Group, jax.Array]) -> tuple[jax.Array, Group]:
            weights, (keys, values), layer = each

            def run() -> tuple[jax.Array, Group]:
                attend = CachedAttention(keys, values, slot, starts, self.model.window)
                y = block(self.model, attend, self._whole(weights, BLOCKS), x, layer, c)
                assert attend.written is not None
                return y, attend.written

            return run() if self.step.placement.full else lax.cond(layer >= 0, run, lambda: (x, (keys, values)))

        if not self._alone:
            return lax.scan(one, x, (weights, cache, layers))
        first = jax.tree.map(lambda a: lax.index_in_dim(a, 0, keepdims=False), (weights, layers))
        return one(x, (first[0], cache, first[1]))
