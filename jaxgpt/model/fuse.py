"""Parameters as stored and weights as computed with: one linear map, made once a step.

Stored: query, key and value, gate and up as arrays of their own, as every other tool names them. Computed with: one
array each, so that a block has one matrix product and one gradient reduction over `tensor` where it had three, and one
gather over `fsdp`. The map is linear, so the gradients go back by its transpose.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.parameters import parameters
from jaxgpt.sharding.named import relayout, reshape

Arrays = dict[str, jax.Array]


def fused_dims(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Named dimensions of every weight that fuse returns."""
    dims = {name: p.dims for name, p in parameters(config).items()}
    for kind in ("weight", "bias"):
        lead = ("layers", "embed") if kind == "weight" else ("layers",)
        if f"blocks.attention.query.{kind}" in dims:
            dims[f"blocks.attention.qkv.{kind}"] = (*lead, "kv_heads", "group", "head")
        if f"blocks.mlp.up.{kind}" in dims:
            dims[f"blocks.mlp.in.{kind}"] = (*lead, "branch", "mlp") if config.gated else (*lead, "mlp")
    parts = ("attention.query.", "attention.key.", "attention.value.", "mlp.up.", "mlp.gate.")
    return {name: d for name, d in dims.items() if not name.startswith(tuple(f"blocks.{part}" for part in parts))}


def fuse(config: ModelConfig, kv_heads: int, stored: Mapping[str, jax.Array]) -> Arrays:
    """Weights for computation from parameters, linear in them.

    attention.qkv: for each key-value head its query heads, its key, its value: [..., M, G + 2, K]. Key-value heads
    are repeated up to kv_heads where `tensor` has more devices than the model has heads.
    """
    weights = {name: stored[name] for name in fused_dims(config) if name in stored}
    for kind, lead in (("weight", "layers embed"), ("bias", "layers")):
        if (query := stored.get(f"blocks.attention.query.{kind}")) is not None:
            key, value = (stored[f"blocks.attention.{part}.{kind}"] for part in ("key", "value"))
            grouped = (*query.shape[:-2], kv_heads, config.heads // kv_heads, config.head)
            q = reshape(query, grouped, f"{lead} kv_heads group head")
            k, v = (_repeated(part, kv_heads, f"{lead} kv_heads head") for part in (key, value))
            weights[f"blocks.attention.qkv.{kind}"] = jnp.concatenate([q, k[..., None, :], v[..., None, :]], -2)
        if (up := stored.get(f"blocks.mlp.up.{kind}")) is not None:
            gate = stored.get(f"blocks.mlp.gate.{kind}")
            weights[f"blocks.mlp.in.{kind}"] = up if gate is None else jnp.stack([gate, up], -2)
    return weights


def _repeated(x: jax.Array, kv_heads: int, dims: str) -> jax.Array:
    """Each key-value head as often as it takes to give every tensor device one."""
    times = kv_heads // x.shape[-2]
    return x if times == 1 else relayout(jnp.repeat(x, times, -2), dims)


def unfuse_gradients(config: ModelConfig, kv_heads: int, stored: Mapping[str, jax.Array], gradients: Arrays) -> Arrays:
    """Gradients of the parameters from those of the weights: fuse's transpose. stored gives types alone."""
    (back,) = jax.linear_transpose(lambda p: fuse(config, kv_heads, p), dict(stored))(gradients)
    return back
