"""Parity has teeth: faults that parallel training is known for, planted one at a time on the mesh alone. Each must be
found, in the arrays that give it away and in no other; without it the same configuration passes.

A device that keeps its own where a sum is due cannot be written down here, since the types refuse it. What it would be
left with, the first device's own on every device, stands in for it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from quickly import placed, unoptimized
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.config import RunConfig
from jaxgpt.model import elementwise, gpt, vocabulary
from jaxgpt.model.attention import Part
from jaxgpt.pipeline import loop, stage
from jaxgpt.pipeline.schedule import FORWARD, INPUT
from jaxgpt.training import microbatch, optimizer, parity, step
from jaxgpt.training.microbatch import Microbatch
from jaxgpt.training.parity import Difference, Trace
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core

DROPPING = dataclasses.replace(GPT, layers=1, dropout=0.1)
PIPED = dataclasses.replace(DROPPING, layers=3)
GROUPED = dataclasses.replace(LLAMA, layers=1, kv_heads=2, tied=False, dropout=0.1)
ONE = {model: run_config(model, clip=0.2) for model in (DROPPING, PIPED, GROUPED)}
"""The gradients' norm is about 0.5, so that they are clipped."""
CASES: dict[str, tuple[RunConfig, str]] = {
    "batch": (dataclasses.replace(ONE[DROPPING], micro_batch=4), "data=2,fsdp=2"),
    "zero": (dataclasses.replace(ONE[DROPPING], zero=1), "data=4"),
    "context": (ONE[DROPPING], "context=2"),
    "pipe": (dataclasses.replace(ONE[PIPED], micro_batch=4, schedule="zero-bubble"), "pipe=2"),
    "tensor": (dataclasses.replace(ONE[GROUPED], sequence_parallel=True), "tensor=4"),
}
"""Configurations and meshes that the faults are planted in."""

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly() -> Iterator[None]:
    """A fault does not hide in the compiler's optimizations."""
    with unoptimized():
        yield


@cache
def on_one_device(config: RunConfig) -> tuple[dict[str, Any], Trace]:
    """The start, and what it computes."""
    start = jax.tree.map(np.asarray, parity.program(config, "data=1").init())
    return start, parity.trace(config, "data=1", batches(config, 1))


def on_the_mesh(case: str, patch: Patch, fault: Callable[[Patch], None] | None = None) -> tuple[Trace, Trace]:
    """What one device computes in a step, and what a mesh does. The start is put on the devices rather than compiled
    for them: that it is the same on every mesh is tested elsewhere."""
    config, mesh = CASES[case]
    start, one = on_one_device(ONE[config.model])  # before the fault is there
    if fault is not None:
        fault(patch)
    patch.setattr(Program, "init", lambda program: placed(program, start))
    return one, parity.trace(config, mesh, batches(config, 1))


def not_clipped(trace: Trace) -> Trace:
    """The trace with its gradients as they were before they were clipped by its norm, which ties every gradient to
    all others. The parameters, which are moved by the clipped ones, are left as they are."""
    share = max(1.0, float(trace.norms[0]) / 0.2)
    return dataclasses.replace(trace, gradients={name: g * share for name, g in trace.gradients.items()})


def before_clipping(one: Trace, other: Trace) -> list[Difference]:
    """Loss, gradient norm and gradients, but for those which are nothing but rounding."""
    found = parity.differences(not_clipped(one), not_clipped(other))
    return [d for d in found if not d.name.startswith("parameter") and "key.bias" not in d.name]


# What stands in for a device's own


def of_first(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x of the first device of axes, on all of them."""
    first = jnp.all(jnp.asarray([lax.axis_index(axis) == 0 for axis in axes]))
    return lax.psum(jnp.where(first, x, jnp.zeros_like(x)), axes)


def loop_with(change: Callable[[jax.Array, Any], tuple[jax.Array, Any]]) -> Callable[..., Any]:
    """The loop over microbatches with another scale of the loss or another batch: change(scale, batch) -> both."""
    real = step.run

    def run(schedule: Any, one: Microbatch, gradients: Any, batch: Any) -> Any:
        scale, batch = change(one.scale, batch)
        return real(schedule, one._replace(scale=scale), gradients, batch)

    return run


# The faults


def reduction_over_data_left_out(patch: Patch) -> None:
    real = step._psum

    def psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if not x.ndim or "data" not in axes:
            return real(x, axes)
        return real(of_first(x, ("data",)), tuple(axis for axis in axes if axis != "data"))

    patch.setattr(step, "_psum", psum)


def tokens_counted_by_device(patch: Patch) -> None:
    def change(scale: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
        return 1 / (4.0 * jnp.sum(batch["targets"] >= 0)), batch

    patch.setattr(step, "run", loop_with(change))


def mask_of_the_first_device(patch: Patch) -> None:
    def change(scale: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
        counted = of_first(jnp.int32(batch["targets"] >= 0), ("data", "fsdp"))
        return scale, batch | {"targets": jnp.where(counted == 1, batch["targets"], -1)}

    patch.setattr(step, "run", loop_with(change))


def microbatches_weighed_alike(patch: Patch) -> None:
    real = Microbatch.head

    def head(self: Microbatch, ends: Any, y: jax.Array, batch: Any) -> Any:
        tokens = lax.psum(jnp.sum(batch["targets"] >= 0), self.axes)
        alike = step.varying(1 / (2 * tokens).astype(jnp.float32), axes=self.axes)
        return real(self._replace(scale=alike), ends, y, batch)

    patch.setattr(Microbatch, "head", head)


def masks_by_a_devices_own_samples(patch: Patch) -> None:
    real = microbatch.context
    patch.setattr(microbatch, "context", lambda model, samples, *rest: real(model, samples % len(samples), *rest))


def tied_gradient_without_the_lookup(patch: Patch) -> None:
    patch.setattr(microbatch, "add_lookup_gradient", lambda dtable, tokens, dx: dtable)


def replicated_gradients_counted_on_every_device(patch: Patch) -> None:
    real = step.global_norm
    axes = ("data", "fsdp")

    def global_norm(gradients: Any, split: Any) -> jax.Array:
        everywhere = {name: step.varying(g, axes=axes) for name, g in gradients.items()}
        return real(everywhere, dict.fromkeys(gradients, axes))

    patch.setattr(step, "global_norm", global_norm)


def clipping_by_a_devices_own_norm(patch: Patch) -> None:
    real = optimizer.Optimizer.update

    def update(self: Any, state: Any, gradients: Any, norm: jax.Array, good: jax.Array) -> Any:
        own = step.global_norm(gradients, dict.fromkeys(gradients, ()))
        return real(self, state, gradients, of_first(own, ("fsdp",)), good)

    patch.setattr(optimizer.Optimizer, "update", update)


def weights_gathered_in_another_order(patch: Patch) -> None:
    real = stage.gather

    def gather(weight: jax.Array, dims: tuple[str, ...], axes: tuple[str, ...]) -> jax.Array:
        whole = real(weight, dims, axes)
        return jnp.roll(whole, whole.shape[dims.index("embed")] // 2, dims.index("embed")) if "embed" in dims else whole

    patch.setattr(stage, "gather", gather)


def mean_for_sum_in_a_reduce_scatter(patch: Patch) -> None:
    real = stage.scatter_sum
    patch.setattr(stage, "scatter_sum", lambda g, dims, axes: real(g, dims, axes) / (2 if "embed" in dims else 1))


def gradients_to_the_wrong_part(patch: Patch) -> None:
    real = step.scatter_sum

    def scatter_sum(gradient: jax.Array, dims: tuple[str, ...], axes: tuple[str, ...]) -> jax.Array:
        part = real(gradient, dims, axes)
        return lax.ppermute(part, "data", [(i, (i + 1) % 4) for i in range(4)]) if axes and "embed" in dims else part

    patch.setattr(step, "scatter_sum", scatter_sum)


def loss_scaled_by_the_context_axis(patch: Patch) -> None:
    patch.setattr(step, "run", loop_with(lambda scale, batch: (scale / 2, batch)))


def positions_within_the_part(patch: Patch) -> None:
    patch.setattr(microbatch, "positions", jnp.arange)


def ring_without_the_second_chunk(patch: Patch) -> None:
    real = Part.forward

    def forward(self: Part, q: jax.Array, k: jax.Array, v: jax.Array, *starts: jax.Array) -> Any:
        out, sums = real(self, q, k, v, *starts)
        missed = not self.causal and q.shape[1] < k.shape[1]
        return (jnp.zeros_like(out), jnp.full_like(sums, -jnp.inf)) if missed else (out, sums)

    patch.setattr(Part, "forward", forward)


def norms_gradient_of_own_tokens(patch: Patch) -> None:
    real = gpt.norm

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, *how: Any) -> jax.Array:
        own = jnp.float32(jnp.arange(x.shape[1]) < x.shape[1] // 4)[:, None]  # those of the first device
        counted = real(lax.stop_gradient(x), scale, bias, *how)
        return real(x, lax.stop_gradient(scale), bias, *how) + own * (counted - lax.stop_gradient(counted))

    patch.setattr(gpt, "norm", norm)


def padding_masked_by_a_devices_own_rows(patch: Patch) -> None:
    real = vocabulary.mask_padding
    patch.setattr(vocabulary, "mask_padding", lambda logits, vocab, first=0: real(logits, vocab))


def gradient_of_one_copy_of_a_key_value_head(patch: Patch) -> None:
    real = step.unfuse_gradients

    def unfuse(config: Any, kv_heads: int, stored: Any, gradients: Any) -> Any:
        name = (
            "blocks.attention.qkv.weight"  # [layers, embed, copies of key-value heads, queries and key and value, head]
        )
        copies, group = gradients[name].shape[2:4]
        kept = (jnp.arange(copies)[:, None] % 2 == 0) | (jnp.arange(group) < group - 2)
        return real(config, kv_heads, stored, gradients | {name: gradients[name] * kept[..., None]})

    patch.setattr(step, "unfuse_gradients", unfuse)


def masks_by_a_devices_own_positions(patch: Patch) -> None:
    real = elementwise.relayout
    patch.setattr(elementwise, "relayout", lambda positions, dims: real(positions % (len(positions) // 4), dims))


def final_norms_gradient_counted_by_every_stage(patch: Patch) -> None:
    real = Microbatch.only
    patch.setattr(Microbatch, "only", lambda self, number, x: x if x.ndim == 1 else real(self, number, x))


def lookups_gradient_from_another_stage(patch: Patch) -> None:
    real = microbatch.from_stage
    # the head's input comes from the last stage, 1, as it should; what comes from the first alone is the lookup's
    patch.setattr(microbatch, "from_stage", lambda placement, number, x: real(placement, number or 1, x))


def read_from_another_place(patch: Patch, ring: str, writer: int) -> None:
    """What the plan says of one ring, read from the place after it; the writer writes where it should."""
    real = loop.plan

    def plan(schedule: Any) -> Any:
        found = real(schedule)
        places, size = getattr(found, ring), getattr(found, f"{ring}s")
        wrong = np.where(schedule.operation == writer, places, (places + 1) % size)
        return dataclasses.replace(found, **{ring: wrong})

    patch.setattr(loop, "plan", plan)


def residuals_of_another_microbatch(patch: Patch) -> None:
    read_from_another_place(patch, "residual", FORWARD)


def weights_part_of_another_microbatch(patch: Patch) -> None:
    read_from_another_place(patch, "split", INPUT)


G, BLOCKS, NORM = "gradient of ", "gradient of blocks.", "gradient norm"
GRADIENTS = f"{NORM}|{G}.+"
ALL = f"loss|{GRADIENTS}"
FAULTS: dict[Callable[[Patch], None], tuple[str, str]] = {
    reduction_over_data_left_out: ("batch", GRADIENTS),
    tokens_counted_by_device: ("batch", GRADIENTS),
    mask_of_the_first_device: ("batch", ALL),
    microbatches_weighed_alike: ("batch", GRADIENTS),
    masks_by_a_devices_own_samples: ("batch", ALL),
    tied_gradient_without_the_lookup: ("batch", f"{NORM}|{G}embedding.token.weight"),
    replicated_gradients_counted_on_every_device: ("batch", NORM),
    clipping_by_a_devices_own_norm: ("batch", G + ".+"),
    weights_gathered_in_another_order: ("batch", ALL),
    mean_for_sum_in_a_reduce_scatter: ("batch", rf"{NORM}|{BLOCKS}(attention|mlp)\.\w+\.weight"),
    gradients_to_the_wrong_part: ("zero", rf"{G}.+\.weight"),
    loss_scaled_by_the_context_axis: ("context", GRADIENTS),
    positions_within_the_part: ("context", ALL),
    ring_without_the_second_chunk: ("context", ALL),
    norms_gradient_of_own_tokens: ("tensor", rf"{NORM}|{G}.*norm\d?\.scale"),
    padding_masked_by_a_devices_own_rows: ("tensor", ALL),
    gradient_of_one_copy_of_a_key_value_head: ("tensor", rf"{NORM}|{BLOCKS}attention\.(key|value)\.weight"),
    masks_by_a_devices_own_positions: ("tensor", ALL),
    final_norms_gradient_counted_by_every_stage: ("pipe", rf"{NORM}|{G}final_norm\.\w+"),
    lookups_gradient_from_another_stage: ("pipe", rf"{NORM}|{G}embedding\..+"),
    residuals_of_another_microbatch: ("pipe", rf"{NORM}|{BLOCKS}.+|{G}embedding\..+"),
    weights_part_of_another_microbatch: ("pipe", f"{NORM}|{BLOCKS}.+"),
}
"""Each fault, where it is planted, and, as a pattern, the arrays that it puts wrong: these and no others."""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_it_passes(case: str, monkeypatch: Patch) -> None:
    one, found = on_the_mesh(case, monkeypatch)
    for each in (parity.differences(one, found), before_clipping(one, found)):
        assert all(d.holds for d in each), each[:3]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    case, given_away_by = FAULTS[fault]
    one, found = on_the_mesh(case, monkeypatch, fault)
    judged = before_clipping(one, found)
    worst = "; ".join(f"{d.name}: {d.found:.2e}, {d.allowed:.2e} allowed" for d in judged[:3])
    print(f"{fault.__name__} is given away by {worst}")
    assert not parity.differences(one, found)[0].holds, f"{fault.__name__} was not found: {worst}"
    wrong = {d.name for d in judged if not d.holds}
    touched = {d.name for d in judged if re.fullmatch(given_away_by, d.name)}
    assert wrong == touched, f"{fault.__name__}: {sorted(wrong ^ touched)}; {worst}"
    assert max(d.share for d in judged) > 1000, f"{fault.__name__} was found only just: {worst}"
