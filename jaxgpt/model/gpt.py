"""The transformer's mathematics, in named dimensions: embedding, block, final norm. No mesh, no layout.

A weight dictionary `w` holds the arrays of one part under their names without the prefix ("attention.qkv.weight"), in
the form that fuse makes of the stored parameters. Letters: B batch, S sequence, D width, N heads, M key-value heads,
G query heads of a key-value head, K head width, F feed-forward width.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from jaxgpt.config import ModelConfig
from jaxgpt.errors import require
from jaxgpt.model import replaced
from jaxgpt.model.attention import attention
from jaxgpt.model.elementwise import activation, dropout, gated, norm, rope_frequencies, rotary
from jaxgpt.model.taps import tap
from jaxgpt.sharding.named import linear, local, psum_over, relayout, varying

Weights = Mapping[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of another kind than a kernel's, to a cache: (q, k, v) -> output of q's shape."""

RESIDUAL = "batch seq embed"
POSITIONS = "positions embed"

POLICIES: dict[str, Any] = {
    "none": None,
    "selective": jax.checkpoint_policies.save_only_these_names(
        "qkv", "attended", "attention_sums", "mlp_in", "attention_added"
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What a block keeps for its backward, by name: none recomputes nothing, selective all but the matrix products'
results and what attention made, full everything from the block's input."""


class Context(NamedTuple):
    """What mathematics needs beside weights: the same for every block of a microbatch."""

    samples: Int[Array, " B"]
    """Number of each sample in the whole global batch."""
    positions: Int[Array, " S"]
    """Position of each token in the whole sequence."""
    key: UInt32[Array, " 2"]
    """Key of this step's dropout."""
    cos: Float[Array, "*rows S half"] | None
    sin: Float[Array, "*rows S half"] | None
    starts: Int[Array, "B S"] | None = None
    """Where documents are apart: position at which each token's begins. Tokens of one document have the same, and the
    position of a token in its document is what is left of its own."""


def context(
    config: ModelConfig,
    samples: Int[Array, " B"],
    positions: Int[Array, " S"],
    key: UInt32[Array, " 2"],
    starts: Int[Array, "B S"] | None = None,
) -> Context:
    """Context of a microbatch, with rotary tables where the model has them: each sample's own, where documents are
    apart."""
    if config.positions != "rotary":
        return Context(samples, positions, key, None, None, starts)
    places = positions if starts is None else positions - starts
    angles = places[..., None] * rope_frequencies(config.rotated, config.rope_base, config.rope_scaling)
    return Context(samples, positions, key, jnp.cos(angles), jnp.sin(angles), starts)


def _norm(config: ModelConfig, w: Weights, name: str, x: jax.Array) -> jax.Array:
    scale, bias = w[f"{name}.scale"], w.get(f"{name}.bias")
    if (own := replaced.active().norm) is not None:
        return replaced.alike(own, own(x, scale, bias), x)
    return norm(x, scale, bias, config.norm, config.norm_epsilon)


def _linear(x: jax.Array, w: Weights, name: str, out: str) -> jax.Array:
    return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"), out)


def _dropout(config: ModelConfig, x: jax.Array, c: Context, layer: jax.Array | int, site: int) -> jax.Array:
    # the embedding is site 0; a block's two are 1 and 2 of its logical layer
    return dropout(x, config.dropout, c.key, jnp.asarray(3 * layer + site, jnp.int32), c.samples, c.positions)


@jax.custom_vjp
def _positioned(x: Float[Array, "B S D"], positions: Float[Array, "S D"]) -> jax.Array:
    """x with positions, which lie whole over the sequence, added to each sequence."""
    return x + relayout(positions, "seq embed").astype(x.dtype)


def _positioned_backward(positions: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Towards positions the sum over the batch in fp32, as for a bias; of one sequence there is nothing to sum, and
    what is gathered has dy's type."""
    summed = dy[0] if dy.shape[0] == 1 else jnp.sum(dy.astype(jnp.float32), 0)
    return dy, relayout(summed, "length embed").astype(positions.dtype)


_positioned.defvjp(lambda x, positions: (_positioned(x, positions), positions), _positioned_backward)


@jax.custom_vjp
def _placed(x: Float[Array, "B S D"], table: Float[Array, "P D"], places: Int[Array, "B S"]) -> jax.Array:
    """x with a row of the table added to each token, each device's own tokens."""

    def add(x: jax.Array, table: jax.Array, places: jax.Array) -> jax.Array:
        return x + table.at[places].get(mode="clip").astype(x.dtype)

    return local(add, (RESIDUAL, POSITIONS, "batch seq"), RESIDUAL)(x, table, places)


def _placed_backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Towards the table a sum in fp32, of each device's own tokens and then over the parts of the sequence."""

    def rows(nothing: jax.Array, places: jax.Array, dy: jax.Array) -> jax.Array:
        return psum_over("seq", varying(nothing, dy).at[places].add(dy.astype(jnp.float32), mode="clip"))

    table, places = kept
    zeros = varying(jnp.zeros(table.shape), dy)
    summed = local(rows, (POSITIONS, "batch seq", RESIDUAL), POSITIONS)(zeros, places, dy)
    return dy, summed.astype(table.dtype), None


_placed.defvjp(lambda x, table, places: (_placed(x, table, places), (table, places)), _placed_backward)


def embed(config: ModelConfig, w: Weights, looked_up: Float[Array, "B S D"], c: Context) -> Float[Array, "B S D"]:
    """Token embeddings, already looked up, to the first block's input. w: of `embedding`."""
    x = looked_up
    if config.positions == "learned":
        table = w["position.weight"]
        if c.starts is None:
            x = _positioned(x, table.at[c.positions].get(mode="clip"))
        else:
            x = _placed(x, table, relayout(c.positions - c.starts, "batch seq"))
    return _dropout(config, x, c, 0, 0)


@jax.custom_vjp
def _parted(x: Float[Array, "B S M H K"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query heads [B, S, N, K], keys and values [B, S, M, K] of each key-value head's G + 2 heads side by side."""
    batch, length, kv, group, head = x.shape
    return x[..., :-2, :].reshape(batch, length, kv * (group - 2), head), x[..., -2, :], x[..., -1, :]


def _parted_backward(_: tuple[()], parts: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    dq, dk, dv = parts
    batch, length, kv, head = dk.shape
    together = [dq.reshape(batch, length, kv, -1, head), dk[..., None, :], dv[..., None, :]]
    return (lax.optimization_barrier(jnp.concatenate(together, -2)),)  # one pass, not one for each of its uses


_parted.defvjp(lambda x: (_parted(x), ()), _parted_backward)


def _attention(config: ModelConfig, w: Weights, h: jax.Array, c: Context, kernel: str | Attend) -> jax.Array:
    x = _linear(h, w, "attention.qkv", "batch length kv_heads group head")
    q, k, v = _parted(checkpoint_name(x, "qkv"))
    if config.qk_norm:
        q = norm(q, w["attention.query_norm.scale"], None, "rmsnorm", config.norm_epsilon)
        k = norm(k, w["attention.key_norm.scale"], None, "rmsnorm", config.norm_epsilon)
    if c.cos is not None and c.sin is not None:
        q, k = rotary(q, c.cos, c.sin), rotary(k, c.cos, c.sin)
    o = _attended(config, q, k, v, kernel, c)
    return _linear(o, w, "attention.out", RESIDUAL)


def _attended(
    config: ModelConfig, q: jax.Array, k: jax.Array, v: jax.Array, kernel: str | Attend, c: Context
) -> jax.Array:
    if callable(kernel):
        return kernel(q, k, v)
    if (own := replaced.active().attention) is not None:
        shown = "separate" if c.starts is not None else "joined"
        require(c.starts is None, "--documents", shown, "is not known to an attention of one's own", "take joined")
        return checkpoint_name(replaced.attention(own, q, k, v), "attended")
    return attention(q, k, v, kernel, config.window, c.starts)


def _mlp(config: ModelConfig, w: Weights, h: jax.Array) -> jax.Array:
    def up(h: jax.Array) -> jax.Array:
        out = "batch length branch mlp" if config.gated else "batch length mlp"
        return checkpoint_name(_linear(h, w, "mlp.in", out), "mlp_in")

    def down(x: jax.Array) -> jax.Array:
        return _linear(x, w, "mlp.down", RESIDUAL)

    if (own := replaced.active().mlp) is not None:
        return replaced.alike(own, own(h, up, down), h)
    return down(_activated(config, up(h)))


def _activated(config: ModelConfig, x: jax.Array) -> jax.Array:
    own = replaced.active().activation
    if own is None:
        return (gated if config.gated else activation)(x, config.activation)
    if config.gated:
        return replaced.activation(own, x[..., 0, :]) * x[..., 1, :]
    return replaced.activation(own, x)


def block(
    config: ModelConfig, kernel: str | Attend, w: Weights, x: Float[Array, "B S D"], layer: Int[Array, ""], c: Context
) -> Float[Array, "B S D"]:
    """One transformer block. layer: its logical index, counted from 0 whatever stage it lies on."""
    with jax.named_scope("attention"):
        h = _norm(config, w, "norm1", x)
        attended = tap("attention", _dropout(config, _attention(config, w, h, c, kernel), c, layer, 1))
    added = checkpoint_name(x + attended, "attention_added")
    with jax.named_scope("mlp"):
        h = _norm(config, w, "norm2", x if config.parallel_residual else added)
        return tap("", added + tap("mlp", _dropout(config, _mlp(config, w, h), c, layer, 2)))


def final_norm(config: ModelConfig, w: Weights, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """The norm between the last block and the head. w: "final_norm.scale" and its bias."""
    return _norm(config, w, "final_norm", x)
