"""The train step: one shard_map, manual over the batch axes and `pipe`, with `tensor` in the types.

Inside it, communication over the manual axes is what these lines say: weights are gathered over fsdp block by block,
gradients are added up over the microbatches and reduced once, after the loop. Communication over `tensor` follows from
the named dimensions in the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.model.elementwise import dropout_key
from jaxgpt.model.fuse import fuse, fused_dims, unfuse_gradients
from jaxgpt.model.gpt import POLICIES, Context, block, context, embed, final_norm
from jaxgpt.model.parameters import parameters
from jaxgpt.model.replaced import NOTHING, Replaced, replaced
from jaxgpt.model.vocabulary import head_logits, lookup, loss_sum
from jaxgpt.pipeline import schedule_file
from jaxgpt.pipeline.groups import Grouped
from jaxgpt.pipeline.loop import run
from jaxgpt.pipeline.parts import from_stage, rows_of, through
from jaxgpt.pipeline.placement import Placement, place
from jaxgpt.pipeline.schedule import Schedule, schedule
from jaxgpt.pipeline.stage import Block, Stage
from jaxgpt.recomputation import Kind, recomputation
from jaxgpt.sharding.collectives import after, gather, scatter_sum
from jaxgpt.sharding.entry import shard_map
from jaxgpt.sharding.layout import Layout, split_axes
from jaxgpt.sharding.named import layout, varying
from jaxgpt.sharding.ring import positions
from jaxgpt.sharding.rows import MANUAL
from jaxgpt.training import offload
from jaxgpt.training.microbatch import BLOCKS, HEAD, TOKEN, Microbatch, head_table, part
from jaxgpt.training.optimizer import Optimizer, global_norm

Arrays = dict[str, jax.Array]
State = dict[str, Any]
UNROLLED = 12
"""Most blocks written out on a single CPU device, where copying what they keep into stacks takes a tenth of a step."""


@dataclass(frozen=True)
class Step:
    """The step's mathematics on one device of the mesh: what runs inside the shard_map."""

    config: RunConfig
    sizes: dict[str, int]
    dtype: Any
    kernel: str
    replaced: Replaced = NOTHING
    """Functions in the place of the model's."""

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config, self.sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The manual axes with more than one device."""
        return self.layout.axes

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those over which tokens lie split."""
        return tuple(axis for axis in self.axes if axis != "pipe")

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Named dimensions of the weights that are computed with."""
        return fused_dims(self.model)

    @property
    def offloaded(self) -> bool:
        """Whether masters and moments lie in the host's memory."""
        return self.config.offload == "optimizer"

    @property
    def head(self) -> str:
        """The table that the head multiplies with."""
        return head_table(self.model)

    @property
    def placement(self) -> Placement:
        """Which layers lie on which stage."""
        return place(self.model.layers, self.sizes["pipe"], self.config.virtual_stages, self.config.stages)

    def schedule(self, microbatches: int) -> Schedule:
        """The table that the loop over microbatches runs. One stage has no schedule to choose."""
        stages, chunks = self.sizes["pipe"], self.config.virtual_stages
        if self.config.schedule_file and stages > 1:
            return schedule_file.read(self.config.schedule_file, (stages, microbatches, chunks))
        return schedule(self.config.schedule if stages > 1 else "1f1b", stages, microbatches, chunks)

    def stage(self, model: ModelConfig) -> Stage | Grouped:
        """The blocks as a stage."""
        said, longest = recomputation(self.config.recompute), self.placement.longest
        count = said.of(longest)
        first = self._blocks(model, said.kind)
        if count in (0, longest):
            return first
        return Grouped(first, self._blocks(model, "none")._replace(unroll=False), count)

    def _blocks(self, model: ModelConfig, recompute: Kind) -> Stage:
        """Blocks that all keep the same; model: with or without dropout."""
        body: Callable[..., jax.Array] = partial(block, model, self.kernel)
        policy = POLICIES[recompute]
        if policy is not None:
            body = jax.checkpoint(body, policy=policy)
        dims = {n.removeprefix(BLOCKS): d[1:] for n, d in self.dims.items() if n.startswith(BLOCKS)}
        alone = set(self.sizes.values()) == {1}
        # not with recomputation: where forward and backward stand side by side, XLA keeps what both compute
        unroll = alone and policy is None and self.kernel == "blocked" and model.layers <= UNROLLED
        return Stage(body, dims, self.layout.rows.used, self.layout.rows.accumulated, self.placement.full, unroll)

    def at_rest(self, params: Arrays) -> Arrays:
        """Parameters fused, matrices in the type of computation, split as they are at rest; and typed as different on
        every device, so that no gradient is reduced before the program says so."""
        return {n: varying(w, axes=self.axes) for n, w in self.cast(params).items()}

    def cast(self, params: Arrays) -> Arrays:
        """Parameters fused, matrices in the type of computation, on the device."""
        matrices = {name for name, d in self.dims.items() if {"embed", "vocab"} & set(d)}

        def cast(params: Arrays) -> Arrays:
            fused = fuse(self.model, self.layout.kv_heads, params)
            return {n: w.astype(self.dtype) if n in matrices else w for n, w in fused.items()}

        return offload.computed(cast, params) if self.offloaded else cast(params)

    def weights(self, at_rest: Arrays) -> Arrays:
        """Weights between their uses: gathered, once a step, over the axes that split only what is at rest."""
        once = self.layout.rows.rest[len(self.layout.rows.used) :]
        with jax.named_scope("gather"):
            return {n: gather(w, self.dims[n], once) for n, w in at_rest.items()}

    def ends(self, weights: Arrays) -> Arrays:
        """Embedding, final norm and head, whole over fsdp. What is no table is typed fp32, as a stage's weights are."""
        with jax.named_scope("gather"):
            names = [n for n in weights if not n.startswith(BLOCKS)]
            whole = {n: gather(weights[n], self.dims[n], self.layout.rows.used) for n in names}
        return {n: w if n in (TOKEN, HEAD) else w.astype(jnp.float32) for n, w in whole.items()}

    def hidden(self, params: Arrays, tokens: jax.Array, starts: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Forward alone and without dropout: the final norm's output for tokens [B, S], and the head's table. starts:
        position at which the document of each begins, where they are apart."""
        x, ends = self.stream(params, tokens, starts=starts)
        return final_norm(self.model, ends, x), ends[self.head]

    def stream(
        self,
        params: Arrays,
        tokens: jax.Array,
        around: Callable[[Block], Block] | None = None,
        starts: jax.Array | None = None,
    ) -> tuple[jax.Array, Arrays]:
        """The residual stream after all blocks, forward alone and without dropout, and the ends. around: makes what is
        run in the place of each block from the block."""
        model = replace(self.model, dropout=0.0)
        weights = self.weights(self.at_rest(params))
        ends, tokens = self.ends(weights), varying(tokens, axes=self.axes)
        nobody = jnp.zeros(tokens.shape[0], jnp.int32)
        starts = starts if starts is None else varying(starts, axes=self.axes)
        c = context(model, nobody, positions(tokens.shape[1]), jnp.zeros(2, jnp.uint32), starts)
        stage = self._blocks(model, recomputation(self.config.recompute).kind)
        if around is not None:
            stage = stage._replace(block=around(partial(block, model, self.kernel)))
        x = embed(model, part(ends, "embedding."), lookup(ends[TOKEN], tokens), c)
        return through(self.placement, partial(self._apply, stage, part(weights, BLOCKS), c), x), ends

    def _apply(self, stage: Stage, blocks: Arrays, c: Context, chunk: jax.Array | int, x: jax.Array) -> jax.Array:
        return stage.apply(blocks, x, rows_of(self.placement, chunk), c)

    def loss_and_gradients(self, params: Arrays, batch: Arrays, step: jax.Array) -> tuple[jax.Array, Arrays, jax.Array]:
        """Loss (a sum over the valid tokens of the global batch, divided once), its gradients, and those tokens."""
        at_rest = self.at_rest(params)
        weights = self.weights(at_rest)
        tokens = self.total(jnp.sum(batch["targets"] >= 0), self.batch_axes)
        batch = batch | {"inputs": after(tokens, batch["inputs"])}
        scale = varying(1 / jnp.maximum(tokens, 1).astype(jnp.float32), axes=self.axes)
        key = varying(dropout_key(self.config.seed, step), axes=self.axes)
        batch = {n: varying(a, axes=self.axes) for n, a in batch.items()}
        like = at_rest if self.layout.rows.accumulated == self.layout.rows.rest else weights
        zeros = {n: varying(jnp.zeros_like(w, dtype=jnp.float32), axes=self.axes) for n, w in like.items()}
        microbatch = Microbatch(
            self.model,
            self.stage(self.model),
            self.placement,
            self.axes,
            weights,
            partial(self.ends, weights),
            self.dims,
            self.layout.rows.accumulated,
            scale,
            key,
            in_order=self.kernel == "blocked",  # on CPU; elsewhere messages may hide under what comes after them
        )
        loss, gradients = run(self.schedule(len(batch["inputs"])), microbatch, zeros, batch)
        with jax.named_scope("reduce"):
            loss = self.total(loss * scale)
            reduced = {n: self.reduced(n, g) for n, g in gradients.items()}
        like = offload.to_device(params) if self.offloaded else params
        return loss, unfuse_gradients(self.model, self.layout.kv_heads, like, reduced), tokens

    def reduced(self, name: str, gradient: jax.Array) -> jax.Array:
        """The accumulated gradient, summed over the axes that are left: scattered where its parameter lies split at
        rest, whole where that is whole."""
        dims, left = self.dims[name], self.layout.rows.rest[len(self.layout.rows.accumulated) :]
        gradient = scatter_sum(gradient, dims, left)
        split = split_axes(self.layout.manual(dims))
        return _psum(gradient, tuple(axis for axis in self.axes if axis not in split))

    def total(self, x: jax.Array, axes: tuple[str, ...] | None = None) -> jax.Array:
        """Sum over all devices of these manual axes (None: of all of them)."""
        axes = self.axes if axes is None else axes
        return _psum(varying(x, axes=axes), axes)

    def update(self, state: State, batch: Arrays, undone: jax.Array) -> tuple[State, Arrays]:
        """One step: state after it, and loss, gradient norm, learning rate, tokens, and steps undone.

        Where loss or gradient are not finite, the state stays what it was, on every device; and so it does in the steps
        that follow, until whoever runs them has seen it: `undone`, the metrics' own of the step before, counts them.
        """
        loss, gradients, tokens = self.loss_and_gradients(state["params"], batch, state["step"])
        norm = self.norm(gradients)
        optimizer = Optimizer(self.config, {n: p.decays for n, p in parameters(self.model).items()})
        # loss and norm are sums over all devices, so that every device finds the same
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (undone == 0)
        update = partial(optimizer.update, norm=norm, good=good)
        new, rate = offload.updated(update, state, gradients) if self.offloaded else update(state, gradients)
        undone = jnp.where(good, 0, undone + 1)
        return new, {"loss": loss, "grad_norm": norm, "lr": rate, "tokens": tokens, "undone": undone}

    def norm(self, gradients: Arrays) -> jax.Array:
        """Of the whole gradient, from each device's part."""
        table = parameters(self.model)
        return global_norm(gradients, {n: split_axes(self.layout.manual(p.dims)) for n, p in table.items()})

    def evaluate(self, params: Arrays, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        """Sum of the loss over the valid tokens of the batch, and their number; no dropout."""
        tokens = self.total(jnp.sum(batch["targets"] >= 0), self.batch_axes)
        h, table = self.hidden(params, after(tokens, batch["inputs"]), batch.get("starts"))
        sums = loss_sum(h, table, varying(batch["targets"], axes=self.batch_axes), self.model.vocab)
        sums = from_stage(self.placement, 0, sums)  # all stages have the same, which the types cannot know
        return self.total(sums, self.batch_axes), tokens

    def logits(self, params: Arrays, tokens: jax.Array, starts: jax.Array | None = None) -> jax.Array:
        """fp32 logits [B, S, padded vocabulary] of tokens [B, S], padded entries masked; no dropout."""
        h, table = self.hidden(params, tokens, starts)
        return head_logits(h, table, self.model.vocab)


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def on_mesh(
    step: Step,
    mesh: Mesh,
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    outputs: Any,
    split_sequence: bool = True,
) -> Callable[..., Any]:
    """function, written for one device, over the mesh; inputs, outputs: the manual part of the layouts.

    split_sequence: whether the sequence lies split where the layout splits it; else every device has all of it.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    sequence = step.layout.sequence if split_sequence else None

    def inside(*args: Any) -> Any:
        with layout(step.layout.typed(), sequence, step.layout.shared(), on_cpu), replaced(step.replaced):
            return function(*args)

    return shard_map(inside, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=set(MANUAL))


def state_specs(step: Step) -> dict[str, Any]:
    """The manual part of the state's layouts."""
    params = {n: step.layout.manual(p.dims) for n, p in parameters(step.model).items()}
    return {"params": params, "mu": params, "nu": params, "step": PartitionSpec()}
