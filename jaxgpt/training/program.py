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
from jaxgpt.model.attention import kernel_for
from jaxgpt.model.parameters import Parameter, parameters, placed, start
from jaxgpt.pipeline.microbatches import micro_batch
from jaxgpt.pipeline.schedule import Schedule
from jaxgpt.processes import together
from jaxgpt.sharding.hosts import put, put_rows
from jaxgpt.sharding.layout import Layout
from jaxgpt.sharding.ring import order
from jaxgpt.training.step import Arrays, State, Step, on_mesh, state_specs

GPU_OPTIONS = {"xla_gpu_copy_insertion_use_region_analysis": True}
"""Without it XLA for GPUs copies what a conditional changes, a pipeline's rings and gradients, in every tick."""


@dataclass(frozen=True)
class Program:
    """The programs of one run. Nothing is compiled before it is first used."""

    config: RunConfig
    mesh: Mesh

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
        return Step(self.config, self.sizes, dtype, kernel_for(self.platform, self.dtype))

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
        table = self.table
        params = {n: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=self.shardings[n]) for n, p in table.items()}
        whole = NamedSharding(self.mesh, PartitionSpec())
        return {
            "params": params,
            "mu": dict(params),
            "nu": dict(params),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        }

    @cached_property
    def compiled_init(self) -> Any:
        """The compiled start. The compiler lays the draws out backwards from their results, so that no device holds a
        whole copy of a split array; for that this one program has no layouts in its types."""
        table, seed = self.table, self.config.seed

        def create() -> State:
            key = jax.random.key(seed, impl="threefry2x32")
            params = {name: start(p, name, key) for name, p in table.items()}
            moments = {kind: {n: jnp.zeros(p.shape) for n, p in table.items()} for kind in ("mu", "nu")}
            return {"params": params, **moments, "step": jnp.int32(0)}

        untyped = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=(AxisType.Auto,) * self.mesh.devices.ndim)
        layouts = jax.tree.map(lambda t: NamedSharding(untyped, t.sharding.spec), self.targets())
        return jax.jit(create, out_shardings=layouts).lower().compile()

    def init(self) -> State:
        """The state before the first step, created split."""
        return jax.tree.map(
            lambda array, target: _retyped(array, target.sharding), self.compiled_init(), self.targets()
        )

    def begin_with(self, params: Arrays) -> State:
        """The state before the first step with other parameters than the start's."""
        targets = self.targets()

        def zeros(target: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros(target.shape, target.dtype, device=target.sharding)

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
        and the number of each sample in it. Of several processes each has the whole batch."""
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
        arrays = {n: self.split_order(a) for n, a in batch.items()} | {"samples": held}
        whole = self.layout.batch()
        layouts = {"inputs": whole, "targets": whole, "samples": PartitionSpec(*whole[:2])}
        shape = (count // rows, rows)

        def on_devices(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
            where = NamedSharding(self.mesh, spec)
            if own is None:
                return put(array.reshape(*shape, *array.shape[1:]), where)
            return put_rows(array, own, shape, where)

        return {n: on_devices(a, layouts[n]) for n, a in arrays.items()}

    def batch_targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and layouts of a placed batch, nothing allocated."""
        rows, seq = self.micro_batch, self.config.model.seq
        lead = (self.config.global_batch // rows, rows)
        whole = self.layout.batch()
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        tokens = shape((*lead, seq), sharding=NamedSharding(self.mesh, whole))
        samples = shape(lead, sharding=NamedSharding(self.mesh, PartitionSpec(*whole[:2])))
        return {"inputs": tokens, "targets": tokens, "samples": samples}

    def _batch_specs(self) -> dict[str, PartitionSpec]:
        whole = self.layout.batch()
        return {"inputs": whole, "targets": whole, "samples": PartitionSpec(*whole[:2])}

    @cached_property
    def _update(self) -> Any:
        step, whole = self.step_of, PartitionSpec()
        state = state_specs(step)
        metrics = dict.fromkeys(("loss", "grad_norm", "lr", "tokens"), whole)
        inside = on_mesh(step, self.mesh, step.update, (state, self._batch_specs()), (state, metrics))
        return jax.jit(inside, donate_argnums=0)

    @cached_property
    def traced(self) -> Any:
        """The traced train step; traced.jaxpr is what the ledger reads."""
        return self._update.trace(self.targets(), self.batch_targets())

    @cached_property
    def compiled(self) -> Any:
        """The compiled train step."""
        on_gpu = self.platform in ("gpu", "cuda")
        compiled = self.traced.lower().compile(compiler_options=GPU_OPTIONS if on_gpu else None)
        together.wait("the step is compiled")  # else the first to run it would wait for the others inside of it
        return compiled

    def step(self, state: State, batch: Arrays) -> tuple[State, Arrays]:
        """One train step; state is given up. Metrics are scalars on the devices."""
        return self.compiled(state, batch)

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
        """These parameters, ready to write texts."""
        return Decoding(self.decoder, params)

    def place_tokens(self, tokens: np.ndarray) -> jax.Array:
        """Tokens [B, S] on the devices; B and S multiples of what the mesh divides them by (divisors)."""
        return put(self.split_order(tokens), NamedSharding(self.mesh, PartitionSpec(*self.layout.batch()[1:])))


def _retyped(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    """The same buffers under a layout whose mesh is typed."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, wanted, parts)
