"""The model written a second time, as plainly as can be: what the real one is held against. No sharding, no scans, no
derivative of its own, attention with its scores in the open."""

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig

Arrays = dict[str, jax.Array]


def norm(config: ModelConfig, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    if config.norm == "layernorm":
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon)
    else:
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return x * scale + (0 if bias is None else bias)


def rms(config: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale


def rotate(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Hugging Face's rotate_half form, each pair (i, i + half) turned by position * base ** (-2 i / rotated)."""
    half = config.rotated // 2
    angles = jnp.arange(x.shape[1])[:, None] * config.rope_base ** (-jnp.arange(half) / half)
    if config.rope_scaling is not None:
        angles = angles / config.rope_scaling.factor
    cos, sin = (jnp.concatenate([f(angles)] * 2, -1)[None, :, None] for f in (jnp.cos, jnp.sin))
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    swapped = jnp.concatenate([-turned[..., half:], turned[..., :half]], -1)
    return jnp.concatenate([turned * cos + swapped * sin, rest], -1)


def attention(config: ModelConfig, p: Arrays, h: jax.Array) -> jax.Array:
    q, k, v = (
        jnp.einsum("bsd,dnk->bsnk", h, p[f"attention.{part}.weight"]) + p.get(f"attention.{part}.bias", 0)
        for part in ("query", "key", "value")
    )
    if config.qk_norm:
        q = rms(config, q, p["attention.query_norm.scale"])
        k = rms(config, k, p["attention.key_norm.scale"])
    if config.positions == "rotary":
        q, k = rotate(config, q), rotate(config, k)
    k, v = (jnp.repeat(x, config.heads // config.kv, 2) for x in (k, v))
    scores = jnp.einsum("bsnk,btnk->bnst", q, k) / config.head**0.5
    distance = jnp.arange(h.shape[1])[:, None] - jnp.arange(h.shape[1])
    seen = (distance >= 0) & (distance < (config.window or h.shape[1]))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    out = jnp.einsum("bnst,btnk->bsnk", weights, v)
    return jnp.einsum("bsnk,nkd->bsd", out, p["attention.out.weight"]) + p.get("attention.out.bias", 0)


def act(config: ModelConfig, x: jax.Array) -> jax.Array:
    match config.activation:
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "silu":
            return jax.nn.silu(x)
        case _:
            return jax.nn.relu(x)


def mlp(config: ModelConfig, p: Arrays, h: jax.Array) -> jax.Array:
    up = h @ p["mlp.up.weight"] + p.get("mlp.up.bias", 0)
    if config.gated:
        x = act(config, h @ p["mlp.gate.weight"] + p.get("mlp.gate.bias", 0)) * up
    else:
        x = act(config, up)
    return x @ p["mlp.down.weight"] + p.get("mlp.down.bias", 0)


def logits(config: ModelConfig, params: Arrays, tokens: jax.Array) -> jax.Array:
    x = params["embedding.token.weight"][tokens]
    if config.positions == "learned":
        x = x + params["embedding.position.weight"][: tokens.shape[1]]
    for layer in range(config.layers):
        p = {n.removeprefix("blocks."): a[layer] for n, a in params.items() if n.startswith("blocks.")}
        attended = attention(config, p, norm(config, x, p["norm1.scale"], p.get("norm1.bias")))
        before = x if config.parallel_residual else x + attended
        forward = mlp(config, p, norm(config, before, p["norm2.scale"], p.get("norm2.bias")))
        x = x + attended + forward
    x = norm(config, x, params["final_norm.scale"], params.get("final_norm.bias"))
    head = params["embedding.token.weight"] if config.tied else params["head.weight"]
    return (x @ head.T)[..., : config.vocab]


def loss(config: ModelConfig, params: Arrays, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    log = jax.nn.log_softmax(logits(config, params, tokens))
    each = -jnp.take_along_axis(log, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets >= 0, each, 0).sum() / (targets >= 0).sum()
