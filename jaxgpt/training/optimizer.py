"""AdamW on each device's own part of the state, with optax; the norm of the gradient counts every parameter once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxgpt.config import RunConfig

Arrays = dict[str, jax.Array]


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Step -> learning rate: linear warm-up from lr / (warmup + 1), then cosine or linear to min_lr at the last step,
    or wsd (arXiv 2404.06395: constant, then linear over the last `decay` of the steps), or constant."""
    rest = max(config.steps - config.warmup, 1)
    fall = max(round(config.steps * config.decay), 1)
    after: optax.Schedule
    match config.lr_schedule:
        case "cosine":
            after = optax.cosine_decay_schedule(config.lr, rest, config.min_lr / config.lr)
        case "linear":
            after = optax.linear_schedule(config.lr, config.min_lr, rest)
        case "wsd":
            after = optax.linear_schedule(config.lr, config.min_lr, fall, max(rest - fall, 0))
        case "constant":
            after = optax.constant_schedule(config.lr)
    start = optax.linear_schedule(config.lr / (config.warmup + 1), config.lr, max(config.warmup, 1))
    return optax.join_schedules([start, after], [config.warmup])


def global_norm(gradients: Arrays, split: Mapping[str, tuple[str, ...]]) -> jax.Array:
    """Norm over all gradients, each element of the logical arrays counted once.

    split: the manual axes over which a gradient lies split. Over `tensor` the types see to it.
    """
    sums: dict[tuple[str, ...], jax.Array] = {}
    for name, gradient in gradients.items():
        sums[split[name]] = sums.get(split[name], 0.0) + jnp.sum(jnp.square(gradient))
    return jnp.sqrt(jnp.asarray(sum(lax.psum(total, axes) if axes else total for axes, total in sums.items())))


@dataclass(frozen=True)
class Optimizer:
    """decays: whether weight decay acts on a parameter."""

    config: RunConfig
    decays: Mapping[str, bool]

    def update(
        self, state: dict[str, Any], gradients: Arrays, norm: jax.Array, good: jax.Array
    ) -> tuple[dict[str, Any], jax.Array]:
        """State after a step, or, where that is not `good`, the one before it; and the learning rate. Of all
        parameters, or of some; all arrays are fp32 parts."""
        c = self.config
        if c.clip:
            factor = jnp.minimum(1.0, c.clip / (norm + 1e-6))
            gradients = {n: g * factor for n, g in gradients.items()}
        rate = jnp.asarray(learning_rate(c)(state["step"]), jnp.float32)
        # scale_by_adam in two parts: chosen between them, moments are made in the place of the old ones, without a copy
        mu = _chosen(good, optax.tree.update_moment(gradients, state["mu"], c.beta1, 1), state["mu"])
        nu = _chosen(good, optax.tree.update_moment_per_elem_norm(gradients, state["nu"], c.beta2, 2), state["nu"])
        count = optax.safe_increment(state["step"])
        unbiased = (optax.tree.bias_correction(m, beta, count) for m, beta in ((mu, c.beta1), (nu, c.beta2)))
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + c.epsilon), *unbiased)
        decay = optax.add_decayed_weights(c.weight_decay, {n: self.decays[n] for n in gradients})
        updates, _ = decay.update(updates, decay.init(state["params"]), state["params"])
        params = _chosen(good, {n: p - rate * updates[n] for n, p in state["params"].items()}, state["params"])
        return {"params": params, "mu": mu, "nu": nu, "step": lax.select(good, count, state["step"])}, rate


def _chosen(good: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    return {name: lax.select(good, array, old[name]) for name, array in new.items()}
