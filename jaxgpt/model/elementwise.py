"""Norms, activations, rotary positions and dropout, each with a derivative that keeps as little as it can.

What an automatic derivative would hold between forward and backward (five copies of a GELU's inside, a dropout mask)
is computed again from the input: cheap arithmetic for memory, the same trade a fused GPU kernel makes.
Letters: B batch, S sequence, D any last dimension, N heads, K head width.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxgpt.config import RopeScaling
from jaxgpt.sharding.named import local, relayout

Kept = tuple[jax.Array | None, ...]


def _statistics(x32: jax.Array, kind: str, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Centre (0 for rmsnorm) and inverse deviation over the last dimension."""
    centre = jnp.mean(x32, -1, keepdims=True) if kind == "layernorm" else jnp.zeros_like(x32[..., :1])
    deviation = x32 - centre
    return centre, lax.rsqrt(jnp.mean(deviation * deviation, -1, keepdims=True) + epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    kind: str,
    epsilon: float,
) -> Float[Array, "*batch D"]:
    """layernorm (arXiv 1607.06450) or rmsnorm (arXiv 1910.07467) over the last dimension: statistics in fp32, result
    in x's type."""
    return _norm_forward(x, scale, bias, kind, epsilon)[0]


def _norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None, kind: str, epsilon: float
) -> tuple[jax.Array, Kept]:
    x32 = x.astype(jnp.float32)
    centre, inverse = _statistics(x32, kind, epsilon)
    y = (x32 - centre) * inverse * scale
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, scale, bias, centre, inverse)


def _norm_backward(
    kind: str, epsilon: float, kept: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array], dy: jax.Array
) -> Kept:
    x, scale, bias, centre, inverse = kept
    dy32 = dy.astype(jnp.float32)
    unit = (x.astype(jnp.float32) - centre) * inverse
    dunit = dy32 * scale
    dx = dunit - unit * jnp.mean(dunit * unit, -1, keepdims=True)
    if kind == "layernorm":
        dx = dx - jnp.mean(dunit, -1, keepdims=True)
    batch = tuple(range(x.ndim - 1))
    dscale = jnp.sum(dy32 * unit, batch).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(dy32, batch).astype(bias.dtype)
    return (dx * inverse).astype(x.dtype), dscale, dbias


norm.defvjp(_norm_forward, _norm_backward)


def _activate(x: jax.Array, kind: str) -> jax.Array:
    match kind:
        case "gelu":
            return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))
        case "gelu_tanh":
            return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
        case "silu":
            return x * lax.logistic(x)
        case "relu":
            return jnp.maximum(x, 0)
        case _:
            raise ValueError(f"no activation {kind}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def activation(x: Float[Array, "*batch D"], kind: str) -> Float[Array, "*batch D"]:
    """gelu (exact), gelu_tanh, silu or relu; keeps its input alone."""
    return _activate(x, kind)


def _activation_backward(kind: str, kept: tuple[jax.Array], dy: jax.Array) -> tuple[jax.Array]:
    # the barriers keep XLA from sharing the inside of forward and backward, which would then be held between them
    x = lax.optimization_barrier(kept[0])
    if kind == "gelu_tanh":  # x * logistic(2 u), with u the tanh's argument: one power where tanh's slope takes two
        slope = 2 * math.sqrt(2 / math.pi)
        share = lax.logistic(slope * x * (1 + 0.044715 * x * x))
        return (dy * (share + share * (1 - share) * slope * x * (1 + 3 * 0.044715 * x * x)),)
    return (jax.vjp(lambda x: _activate(x, kind), x)[1](dy)[0],)


activation.defvjp(lambda x, kind: (lax.optimization_barrier(activation(x, kind)), (x,)), _activation_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gated(x: Float[Array, "*batch 2 F"], kind: str) -> Float[Array, "*batch F"]:
    """activation(gate) * up of gate and up side by side (SwiGLU with silu, arXiv 2002.05202); keeps its input alone."""
    return _activate(x[..., 0, :], kind) * x[..., 1, :]


def _gated_backward(kind: str, kept: tuple[jax.Array], dy: jax.Array) -> tuple[jax.Array]:
    (x,) = kept
    act, derivative = jax.vjp(lambda gate: _activate(gate, kind), x[..., 0, :])
    return (jnp.stack([derivative(dy * x[..., 1, :])[0], dy * act], -2),)


gated.defvjp(lambda x, kind: (gated(x, kind), (x,)), _gated_backward)


def rope_frequencies(rotated: int, base: float, scaling: RopeScaling | None) -> Float[Array, " half"]:
    """Angle a position of each rotated pair of dimensions (arXiv 2104.09864), stretched as `scaling` says."""
    frequencies = base ** (-jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: long wavelengths are divided by the factor, short ones kept, those between blended
    turns = scaling.original_seq * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


@jax.custom_vjp
def rotary(
    x: Float[Array, "B S N K"], cos: Float[Array, "*rows S half"], sin: Float[Array, "*rows S half"]
) -> Float[Array, "B S N K"]:
    """Turns the first 2 * half dimensions of each head, first half against second half as Hugging Face's models do.

    The tables, the same for all rows or each row's own, come from fp32 angles: in bf16 positions beyond 256 would be
    rounded.
    """
    return _turn(x, cos, sin)


def _rotary_backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> Kept:
    cos, sin = kept
    return _turn(dy, cos, -sin), jnp.zeros_like(cos), jnp.zeros_like(sin)


rotary.defvjp(lambda x, cos, sin: (_turn(x, cos, sin), (cos, sin)), _rotary_backward)


def dropout_key(seed: int, step: Int[Array, ""]) -> UInt32[Array, " 2"]:
    """The key of a step's masks, as plain numbers that a loop can carry."""
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed + 1, impl="threefry2x32"), step))


def _kept_mask(
    shape: tuple[int, ...], rate: float, key: jax.Array, site: jax.Array, samples: jax.Array, positions: jax.Array
) -> jax.Array:
    """Which elements live: a function of key, site, the sample's number in the global batch, and the position in the
    whole sequence. So every mesh, microbatch size and recomputation draws the same mask, and no two samples do."""
    base = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), site)
    by_sample = jax.vmap(lambda sample: jax.random.fold_in(base, sample))(samples)
    by_position = jax.vmap(lambda k: jax.vmap(lambda position: jax.random.fold_in(k, position))(positions))(by_sample)
    bits = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, shape[-1:], jnp.uint32)))(by_position)
    return bits >= jnp.uint32(round(rate * 2**32))


def _drop(x: jax.Array, rate: float, *draw: jax.Array) -> jax.Array:
    def part(x: jax.Array, *draw: jax.Array) -> jax.Array:
        return jnp.where(_kept_mask(x.shape, rate, *draw), x * (1 / (1 - rate)), jnp.zeros_like(x))

    *numbers, positions = draw
    run = local(part, ("batch seq embed", "key", "", "batch", "seq"), "batch seq embed")
    return run(x, *numbers, relayout(positions, "seq"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dropout(x: jax.Array, rate: float, draw: tuple[jax.Array, ...]) -> jax.Array:
    return _drop(x, rate, *draw)


_dropout.defvjp(
    lambda x, rate, draw: (_drop(x, rate, *draw), draw),
    lambda rate, draw, dy: (_drop(dy, rate, *draw), tuple(None for _ in draw)),
)


def dropout(
    x: Float[Array, "B S D"],
    rate: float,
    key: UInt32[Array, " 2"],
    site: Int[Array, ""],
    samples: Int[Array, " B"],
    positions: Int[Array, " S"],
) -> Float[Array, "B S D"]:
    """Zeroes a share `rate` of x and scales the rest; the mask is drawn again in the backward, not kept.

    site: which dropout of which layer. samples, positions: numbers in the whole global batch and sequence.
    """
    return x if rate == 0 else _dropout(x, rate, (key, site, samples, positions))
