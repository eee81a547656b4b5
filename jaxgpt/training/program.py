"""A configuration on a mesh as compiled programs: start, step, evaluation, logits. What all the rest calls."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import RunConfig
from jaxgpt.inference.decoder import Decoder
from jaxgpt.inference.decoding import Decoding, Writing
from jaxgpt.inference.rereading import Rereading
from jaxgpt.model.attention import kernel_for
from jaxgpt.model.parameters import Parameter, parameters, placed, start
from jaxgpt.model.replaced import NOTHING, Replaced
from jaxgpt.pipeline.microbatches import micro_batch
from jaxgpt.pipeline.schedule import Schedule
from jaxgpt.processes import together
from jaxgpt.sharding.hosts import put, put_rows
from jaxgpt.sharding.layout import Layout
from jaxgpt.sharding.ring import order
from jaxgpt.training import offload
from jaxgpt.training.step import Arrays, State, Step, on_mesh, state_specs

GPU_OPTIONS = {"xla_gpu_copy_insertion_use_region_analysis": True}
"""Without it XLA for GPUs copies what a conditional changes, a pipeline's rings and gradients, in every tick."""


@dataclass(frozen=True)
class Program:
    """The programs of one run. Nothing is compiled before it is first used."""

    config: RunConfig
    mesh: Mesh
    replaced: Replaced = NOTHING
    """Functions in the place of the model's."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return dict(self.mesh.shape)

    @cached_property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @cached_property
    def dtype(self) -> str:
        """Type of computation, "bf16" or "fp32"."""
        automatic = "bf16" if self.platform in ("gpu", "cuda") else "fp32"
        return automatic if self.config.dtype == "auto" else self.config.dtype

    @cached_property
    def step_of(self) -> Step:
        dtype = jnp.bfloat16 if self.dtype == "bf16" else jnp.float32
        return Step(self.config, self.sizes, dtype, self.kernel, self.replaced)

    @property
    def separate(self) -> bool:
        """Whether attention and positions stop at a document's edge."""
        return self.config.documents == "separate"

    @cached_property
    def kernel(self) -> str:
        """Of attention; where documents are separate, a mask of a device's tokens at once."""
        return kernel_for(self.platform, self.dtype, self._at_once if self.separate else None)

    @property
    def _at_once(self) -> int:
        """Fewest tokens that the kernel is given at once: of a split sequence a chunk."""
        return self.config.model.seq // self.divisors[1]

    @property
    def fallback(self) -> str | None:
        """Why the kernel is another one than joined documents would have; None where it is the same."""
        joined = kernel_for(self.platform, self.dtype)
        if self.kernel == joined:
            return None
        return (
            f"attention by {self.kernel} in place of {joined}, whose masks, which --documents separate needs, "
            f"have an even number of tokens: --seq {self.config.model.seq} gives a device {self._at_once} at once"
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The table that the train step's loop runs."""
        return self.step_of.schedule(self.config.global_batch // self.micro_batch)

    @cached_property
    def layout(self) -> Layout:
        return self.step_of.layout

    @cached_property
    def logical(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter without padding."""
        return {name: p.logical for name, p in parameters(self.config.model).items()}

    @cached_property
    def table(self) -> dict[str, Parameter]:
        """Every parameter as this mesh holds it: blocks in the rows of their stages."""
        return placed(parameters(self.config.model), self.step_of.placement.order)

    @cached_property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """Logical layer of each row of the parameters whose rows are not the layers in order."""
        return {name: p.rows for name, p in self.table.items() if p.rows is not None}

    def in_order(self, name: str, array: np.ndarray) -> np.ndarray:
        """A parameter, or an array like it, with its layers in their order."""
        if name not in self.rows:
            return array
        return array[[self.rows[name].index(layer) for layer in range(self.config.model.layers)]]

    @cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        """Layout of each parameter."""
        return {n: NamedSharding(self.mesh, self.layout.stored(p.dims)) for n, p in self.table.items()}

    def targets(self) -> State:
        """Shapes, types and layouts of the state, nothing allocated."""
        places = {n: self._kept_in(sharding) for n, sharding in self.shardings.items()}
        params = {n: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=places[n]) for n, p in self.table.items()}
        whole = NamedSharding(self.mesh, PartitionSpec())
        return {
            "params": params,
            "mu": dict(params),
            "nu": dict(params),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        }

    def _kept_in(self, layout: NamedSharding) -> NamedSharding:
        """A layout in the memory in which the state lies between steps."""
        return layout.with_memory_kind(offload.HOST) if self.config.offload == "optimizer" else layout

    @cached_property
    def compiled_init(self) -> Any:
        """The compiled start, on the devices; without moments where those lie elsewhere. The compiler lays the draws
        out backwards from their results, so that no device holds a whole copy of a split array; for that this one
        program has no layouts in its types."""
        table, seed = self.table, self.config.seed
        kinds = ("mu", "nu") if self.config.offload == "none" else ()

        def create() -> State:
            key = jax.random.key(seed, impl="threefry2x32")
            params = {name: start(p, name, key) for name, p in table.items()}
            moments = {kind: {n: jnp.zeros(p.shape) for n, p in table.items()} for kind in kinds}
            return {"params": params, **moments, "step": jnp.int32(0)}

        untyped = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=(AxisType.Auto,) * self.mesh.devices.ndim)
        of_state = {kind: targets for kind, targets in self.targets().items() if kind in ("params", "step", *kinds)}
        layouts = jax.tree.map(lambda t: NamedSharding(untyped, t.sharding.spec), of_state)
        return jax.jit(create, out_shardings=layouts).lower().compile()

    def init(self) -> State:
        """The state before the first step, created split."""
        begun = self.compiled_init()
        if self.config.offload != "none":
            return self.begin_with({n: _retyped(a, self.shardings[n]) for n, a in begun["params"].items()})
        return jax.tree.map(lambda array, target: _retyped(array, target.sharding), begun, self.targets())

    def begin_with(self, params: Arrays) -> State:
        """The state before the first step with other parameters than the start's, laid out as `shardings` says."""
        targets = self.targets()
        offloaded = self.config.offload != "none"
        if offloaded:
            params = {n: jax.device_put(a, targets["params"][n].sharding) for n, a in params.items()}

        def zeros(target: jax.ShapeDtypeStruct) -> jax.Array:
            if not offloaded:
                return jnp.zeros(target.shape, target.dtype, device=target.sharding)
            whole = np.broadcast_to(np.zeros((), target.dtype), target.shape)
            return jax.make_array_from_callback(target.shape, target.sharding, lambda index: whole[index])

        return {"params": params} | {kind: jax.tree.map(zeros, targets[kind]) for kind in ("mu", "nu", "step")}

    @property
    def divisors(self) -> tuple[int, int]:
        """What the mesh divides batch and sequence by."""
        context = self.sizes["context"]
        return self.sizes["data"] * self.sizes["fsdp"], 2 * context if context > 1 else 1

    def split_order(self, tokens: np.ndarray) -> np.ndarray:
        """[B, S] in the order in which the sequence lies over its devices."""
        if self.layout.sequence is None:
            return tokens
        return tokens[:, order(tokens.shape[1], self.sizes["context"])]

    def sequence_order(self, length: int) -> np.ndarray:
        """Where each position of the text lies in a sequence that is split over its devices."""
        if self.layout.sequence is None:
            return np.arange(length)
        return np.argsort(order(length, self.sizes["context"]))

    def text_order(self, split: jax.Array) -> jax.Array:
        """[B, S, ...] in the order of the text again."""
        if self.layout.sequence is None:
            return split
        return split[:, self.sequence_order(split.shape[1])]

    @property
    def micro_batch(self) -> int:
        """Sequences in a microbatch, over all devices."""
        return micro_batch(self.config, self.sizes) * self.sizes["data"] * self.sizes["fsdp"]

    def place(self, batch: dict[str, np.ndarray]) -> Arrays:
        """A global batch of {"inputs", "targets"}, int32 [global_batch, seq], on the devices: [microbatch, batch, seq];
        and the number of each sample in it. Where documents are separate, also of {"starts"}, the place in its row at
        which each token's document begins; a batch without them has a document a row. Of several processes each has the
        whole batch."""
        return self._placed(batch, None)

    @cached_property
    def own_samples(self) -> np.ndarray | None:
        """Numbers, in a global batch, of the samples that this process's devices take, in order; None: of all."""
        if together.count() == 1:
            return None
        where = NamedSharding(self.mesh, PartitionSpec(*self.layout.batch()[:2]))
        shape = (self.config.global_batch // self.micro_batch, self.micro_batch)
        numbers = np.arange(self.config.global_batch).reshape(shape)
        parts = where.addressable_devices_indices_map(shape).values()
        return np.unique(np.concatenate([numbers[index].ravel() for index in parts]))

    def place_own(self, batch: dict[str, np.ndarray]) -> Arrays:
        """As place, of a global batch of which each process has its own samples alone."""
        return self.place(batch) if self.own_samples is None else self._placed(batch, self.own_samples)

    def _placed(self, batch: dict[str, np.ndarray], own: np.ndarray | None) -> Arrays:
        rows = self.micro_batch
        count = len(batch["inputs"]) if own is None else self.config.global_batch
        held = np.arange(count, dtype=np.int32) if own is None else own.astype(np.int32)
        if self.separate:
            batch = {"starts": np.zeros_like(batch["inputs"])} | batch
        arrays = {n: self.split_order(a) for n, a in batch.items()} | {"samples": held}
        layouts = self._batch_specs()
        shape = (count // rows, rows)

        def on_devices(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
            where = NamedSharding(self.mesh, spec)
            if own is None:
                return put(array.reshape(*shape, *array.shape[1:]), where)
            return put_rows(array, own, shape, where)

        return {n: on_devices(a, layouts[n]) for n, a in arrays.items()}

    def batch_targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and layouts of a placed batch, nothing allocated."""
        lead = (self.config.global_batch // self.micro_batch, self.micro_batch)
        tokens = (*lead, self.config.model.seq)
        layouts = {n: NamedSharding(self.mesh, spec) for n, spec in self._batch_specs().items()}
        return {
            n: jax.ShapeDtypeStruct(lead if n == "samples" else tokens, jnp.int32, sharding=where)
            for n, where in layouts.items()
        }

    def _batch_specs(self) -> dict[str, PartitionSpec]:
        whole = self.layout.batch()
        tokens = ("inputs", "targets", "starts") if self.separate else ("inputs", "targets")
        return dict.fromkeys(tokens, whole) | {"samples": PartitionSpec(*whole[:2])}

    @cached_property
    def _update(self) -> Any:
        step, whole = self.step_of, PartitionSpec()
        state = state_specs(step)
        metrics = dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "undone"), whole)
        inside = on_mesh(step, self.mesh, step.update, (state, self._batch_specs(), whole), (state, metrics))
        # What lies in the host's memory is written anew: given up, it would be copied there once more. Devices that
        # are absent know no such memory (their layouts drop its name) but for results, and what becomes a result.
        kept = next(iter(self.targets()["params"].values())).sharding.memory_kind == offload.HOST
        return jax.jit(inside, donate_argnums=() if kept else 0)

    @cached_property
    def traced(self) -> Any:
        """The traced train step; traced.jaxpr is what the ledger reads."""
        targets = self.targets()
        return self._update.trace(targets, self.batch_targets(), targets["step"])

    @cached_property
    def compiled(self) -> Any:
        """The compiled train step."""
        on_gpu = self.platform in ("gpu", "cuda")
        compiled = self.traced.lower().compile(compiler_options=GPU_OPTIONS if on_gpu else None)
        together.wait("the step is compiled")  # else the first to run it would wait for the others inside of it
        return compiled

    @cached_property
    def none_undone(self) -> jax.Array:
        """What a step is told where none before it was undone."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.make_array_from_callback((), whole, lambda _: np.zeros((), np.int32))

    def step(self, state: State, batch: Arrays) -> tuple[State, Arrays]:
        """One train step; state is given up. Metrics are scalars on the devices.

        batch: placed; and `undone`, as it stands in the metrics of the step before: above 0, this one is undone, too.
        """
        tokens = {name: array for name, array in batch.items() if name != "undone"}
        return self.compiled(state, tokens, batch.get("undone", self.none_undone))

    @cached_property
    def gradients(self) -> Any:
        """(params, placed batch, step) -> loss, gradient of every parameter, tokens: what the parity suite compares."""
        step, whole = self.step_of, PartitionSpec()
        params = state_specs(step)["params"]
        inputs = (params, self._batch_specs(), whole)
        return jax.jit(on_mesh(step, self.mesh, step.loss_and_gradients, inputs, (whole, params, whole)))

    @cached_property
    def evaluate(self) -> Any:
        """(params, placed batch of one microbatch) -> sum of the loss, tokens."""
        step, whole = self.step_of, PartitionSpec()

        def first(params: Arrays, batch: Arrays) -> tuple[jax.Array, jax.Array]:
            return step.evaluate(params, {n: a[0] for n, a in batch.items()})

        inputs = (state_specs(step)["params"], self._batch_specs())
        return together.at_once(jax.jit(on_mesh(step, self.mesh, first, inputs, (whole, whole))))

    @cached_property
    def logits(self) -> Any:
        """(params, tokens [B, S] as place_tokens lays them) -> fp32 logits [B, S, padded vocabulary], in that order."""
        step, whole = self.step_of, self.layout.batch()
        specs = PartitionSpec(*whole[1:])
        inputs = (state_specs(step)["params"], specs)
        outputs = PartitionSpec(*specs, self.layout.shared().get("vocab"))
        return jax.jit(on_mesh(step, self.mesh, step.logits, inputs, outputs))

    @cached_property
    def decoder(self) -> Decoder:
        """The model with a cache."""
        return Decoder(self.step_of, self.mesh)

    def decoding(self, params: Arrays) -> Writing:
        """These parameters, ready to write texts: with a cache, unless attention is the user's own."""
        if self.replaced.attention is not None:
            return Rereading(partial(self.whole_logits, params), self.config.model)
        return Decoding(self.decoder, params)

    def whole_logits(self, params: Arrays, tokens: np.ndarray) -> jax.Array:
        """fp32 logits [B, S, padded vocabulary] of tokens [B, S], any B and S, in the order of the text, whole on every
        device."""
        logits = self.logits(params, self.place_tokens(self.padded(tokens)))
        whole = jax.device_put(logits, NamedSharding(self.mesh, PartitionSpec()))
        return self.text_order(whole)[: tokens.shape[0], : tokens.shape[1]]

    def padded(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [B, S] with rows and columns added up to what the mesh divides them by."""
        rows, columns = (-size % divisor for size, divisor in zip(tokens.shape, self.divisors, strict=True))
        return np.pad(tokens, ((0, rows), (0, columns)))

    def place_tokens(self, tokens: np.ndarray) -> jax.Array:
        """Tokens [B, S] on the devices; B and S multiples of what the mesh divides them by (divisors)."""
        return put(self.split_order(tokens), NamedSharding(self.mesh, PartitionSpec(*self.layout.batch()[1:])))


def _retyped(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    """The same buffers under a layout whose mesh is typed."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, wanted, parts)
