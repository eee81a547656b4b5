"""Parity has teeth: faults that parallel training is known for, planted one at a time on the mesh alone. Each must be
found, in the array that gives it away; without it the same configuration passes.

A device that keeps its own where a sum is due cannot be written down here, since the types refuse it. What it would be
left with, the first device's own on every device, stands in for it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from quickly import unoptimized
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.config import RunConfig
from jaxgpt.model import elementwise, gpt, vocabulary
from jaxgpt.model.attention import Part
from jaxgpt.pipeline import stage
from jaxgpt.training import optimizer, parity, step
from jaxgpt.training.parity import Difference, Trace
from jaxgpt.training.program import Program
from jaxgpt.training.step import Step

pytestmark = pytest.mark.core

DROPPING = dataclasses.replace(GPT, layers=1, dropout=0.1)
GROUPED = dataclasses.replace(LLAMA, layers=1, kv_heads=2, tied=False, dropout=0.1)
ONE = {model: run_config(model, clip=0.2) for model in (DROPPING, GROUPED)}
"""The gradients' norm is about 0.5, so that they are clipped."""
CASES: dict[str, tuple[RunConfig, str]] = {
    "batch": (dataclasses.replace(ONE[DROPPING], micro_batch=4), "data=2,fsdp=2"),
    "zero": (dataclasses.replace(ONE[DROPPING], zero=1), "data=4"),
    "context": (ONE[DROPPING], "context=2"),
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


def differences(case: str, patch: Patch) -> list[Difference]:
    """Every array of a mesh's first step against one device's. The start is put on the devices rather than compiled for
    them: that it is the same on every mesh is tested elsewhere."""
    config, mesh = CASES[case]
    start, one = on_one_device(ONE[config.model])

    def placed(program: Program) -> Any:
        return jax.tree.map(lambda array, t: jax.device_put(array, t.sharding), start, program.targets())

    patch.setattr(Program, "init", placed)
    return parity.differences(one, parity.trace(config, mesh, batches(config, 1)))


@cache
def clean(case: str) -> list[Difference]:
    with pytest.MonkeyPatch.context() as patch:
        return differences(case, patch)


# What stands in for a device's own


def of_first(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x of the first device of axes, on all of them."""
    first = jnp.all(jnp.asarray([lax.axis_index(axis) == 0 for axis in axes]))
    return lax.psum(jnp.where(first, x, jnp.zeros_like(x)), axes)


def loop_with(change: Callable[[jax.Array, Any], tuple[jax.Array, Any]]) -> Callable[..., Any]:
    """The loop over microbatches with another scale of the loss or another batch: change(scale, batch) -> both."""
    real = step.run

    def run(schedule: Any, both: Any, carry: Any, batch: Any) -> Any:
        weights, scale, key = both.args
        scale, batch = change(scale, batch)
        return real(schedule, partial(both.func, weights, scale, key), carry, batch)

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
    real = Step.both

    def both(self: Step, weights: Any, scale: jax.Array, key: Any, carry: Any, batch: Any) -> Any:
        tokens = lax.psum(jnp.sum(batch["targets"] >= 0), self.axes)
        alike = step.varying(1 / (2 * tokens).astype(jnp.float32), axes=self.axes)
        return real(self, weights, alike, key, carry, batch)

    patch.setattr(Step, "both", both)


def masks_by_a_devices_own_samples(patch: Patch) -> None:
    real = step.context
    patch.setattr(step, "context", lambda model, samples, *rest: real(model, samples % len(samples), *rest))


def tied_gradient_without_the_lookup(patch: Patch) -> None:
    patch.setattr(step, "add_lookup_gradient", lambda dtable, tokens, dx: dtable)


def replicated_gradients_counted_on_every_device(patch: Patch) -> None:
    real = step.global_norm
    axes = ("data", "fsdp")

    def global_norm(gradients: Any, split: Any) -> jax.Array:
        everywhere = {name: step.varying(g, axes=axes) for name, g in gradients.items()}
        return real(everywhere, dict.fromkeys(gradients, axes))

    patch.setattr(step, "global_norm", global_norm)


def clipping_by_a_devices_own_norm(patch: Patch) -> None:
    real = optimizer.Optimizer.update

    def update(self: Any, state: Any, gradients: Any, norm: jax.Array) -> Any:
        own = step.global_norm(gradients, dict.fromkeys(gradients, ()))
        return real(self, state, gradients, of_first(own, ("fsdp",)))

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
    patch.setattr(step, "positions", jnp.arange)


def ring_without_the_second_chunk(patch: Patch) -> None:
    real = Part.forward

    def forward(self: Part, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, sums = real(self, q, k, v)
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


G, BLOCKS = "gradient of ", "gradient of blocks."
FAULTS: dict[Callable[[Patch], None], tuple[str, str]] = {
    reduction_over_data_left_out: ("batch", BLOCKS + "mlp.up.bias"),
    tokens_counted_by_device: ("batch", BLOCKS + "mlp.up.bias"),
    mask_of_the_first_device: ("batch", BLOCKS + "mlp.up.bias"),
    microbatches_weighed_alike: ("batch", "parameter blocks.attention.out.bias"),
    masks_by_a_devices_own_samples: ("batch", BLOCKS + "attention.value.bias"),
    tied_gradient_without_the_lookup: ("batch", G + "embedding.token.weight"),
    replicated_gradients_counted_on_every_device: ("batch", "gradient norm"),
    clipping_by_a_devices_own_norm: ("batch", G + ".+"),
    weights_gathered_in_another_order: ("batch", BLOCKS + "attention.value.bias"),
    mean_for_sum_in_a_reduce_scatter: ("batch", BLOCKS + r"(attention|mlp)\.\w+\.weight"),
    gradients_to_the_wrong_part: ("zero", BLOCKS + "mlp.up.weight"),
    loss_scaled_by_the_context_axis: ("context", "gradient norm"),
    positions_within_the_part: ("context", G + "embedding.position.weight"),
    ring_without_the_second_chunk: ("context", BLOCKS + "attention.value.bias"),
    norms_gradient_of_own_tokens: ("tensor", G + "final_norm.scale"),
    padding_masked_by_a_devices_own_rows: ("tensor", G + "head.weight"),
    gradient_of_one_copy_of_a_key_value_head: ("tensor", BLOCKS + "attention.value.weight"),
    masks_by_a_devices_own_positions: ("tensor", BLOCKS + "mlp.down.weight"),
}
"""Each fault, where it is planted, and the array that gives it away, as a pattern."""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_it_passes(case: str) -> None:
    found = clean(case)
    assert all(d.holds for d in found), found[:3]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    case, given_away_by = FAULTS[fault]
    fault(monkeypatch)
    found = differences(case, monkeypatch)
    worst = "; ".join(f"{d.name}: {d.found:.2e}, {d.allowed:.2e} allowed" for d in found[:3])
    print(f"{fault.__name__} is given away by {worst}")
    assert not found[0].holds, f"{fault.__name__} was not found: {worst}"
    assert re.fullmatch(given_away_by, found[0].name), f"{fault.__name__} was given away by {worst}"
