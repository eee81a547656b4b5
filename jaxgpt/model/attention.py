"""Attention: a kernel on each device's own heads, with what it keeps for its backward handed out.

A fused kernel inside a nested shard_map cannot be differentiated plainly, so forward and backward are each a nested
shard_map of their own; and what lies between them is handed out, so that a pipeline can keep it.
Letters: B batch, S queries and keys, N query heads, M key-value heads, K head width.
"""

import functools
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from jaxgpt.model import blocked
from jaxgpt.sharding.named import local

QUERIES = "batch length heads head"
KEYS = "batch length kv_heads head"

SUMS = "batch length heads"

KERNELS = ("cudnn", "xla", "blocked")
"""cudnn: jax.nn.dot_product_attention's fused GPU kernel, which hands out what it keeps. xla: the same function in
plain operations; its backward computes the scores again. blocked: jaxgpt.model.blocked, for CPUs."""


def kernel_for(platform: str, dtype: str) -> str:
    """cudnn on GPUs in 16-bit types, which it needs, else xla; blocked on CPUs."""
    if platform in ("gpu", "cuda", "rocm"):
        return "cudnn" if dtype == "bf16" and platform != "rocm" else "xla"
    return "blocked" if platform == "cpu" else "xla"


def _core(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> jax.Array:
    reach = None if window is None else (window - 1, 0)
    implementation: Literal["cudnn", "xla"] = "cudnn" if kernel == "cudnn" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=reach, implementation=implementation)


def _derived(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> tuple[jax.Array, Any]:
    """jax.nn's output and its derivative."""
    return jax.vjp(functools.partial(_core, kernel=kernel, window=window), q, k, v)


def _handed_out(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> list[str | None]:
    """The named dimensions of each array that jax.nn's kernel keeps; None for constants, which are made again.

    The dimension of heads is the one that doubles when the heads do.
    """

    def shapes(times: int) -> list[tuple[int, ...]]:
        double = [jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * times, x.shape[3]), x.dtype) for x in (q, k, v)]
        return [r.shape for r in jax.eval_shape(inside, *double)]

    def inside(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        return list(_derived(q, k, v, kernel, window)[1].opaque_residuals)

    def names(one: tuple[int, ...], two: tuple[int, ...]) -> str | None:
        dims = ["heads" if a != b else "head" for a, b in zip(one, two, strict=True)]
        return " ".join(dims) if "heads" in dims else None

    return [names(one, two) for one, two in zip(shapes(1), shapes(2), strict=True)]


def _forward_local(
    q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None, dims: list[str | None]
) -> tuple[jax.Array, list[jax.Array]]:
    """Output and what is kept of a device's own heads; dims: of _handed_out."""
    if kernel == "blocked":
        out, sums = blocked.forward(q, k, v, window)
        return out, [out, sums]
    if kernel == "xla":
        return _core(q, k, v, kernel, window), []
    out, derivative = _derived(q, k, v, kernel, window)
    return out, [r for r, names in zip(derivative.opaque_residuals, dims, strict=True) if names]


def _backward_local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kept: list[jax.Array],
    dout: jax.Array,
    kernel: str,
    window: int | None,
    dims: list[str | None],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of a device's own heads."""
    if kernel == "blocked":
        out, sums = kept
        return blocked.backward(q, k, v, out, sums, dout, window)
    _, derivative = _derived(q, k, v, kernel, window)
    if kernel == "cudnn":
        handed, own = iter(kept), derivative.opaque_residuals
        derivative.opaque_residuals = [next(handed) if names else r for r, names in zip(own, dims, strict=True)]
    dq, dk, dv = derivative(dout)
    return dq, dk, dv


def _kept_dims(
    q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None
) -> tuple[list[str | None], list[str]]:
    """What jax.nn's kernel keeps, and the named dimensions of what is handed out."""
    if kernel == "blocked":
        return [], [QUERIES, SUMS]
    dims = _handed_out(q, k, v, kernel, window) if kernel == "cudnn" else []
    return dims, [names for names in dims if names]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(
    q: Float[Array, "B S N K"], k: Float[Array, "B S M K"], v: Float[Array, "B S M K"], kernel: str, window: int | None
) -> Float[Array, "B S N K"]:
    """softmax(q k^T / sqrt(K)) v over what each position may see: itself and all before it, or window - 1 of them.

    Query heads share key-value heads in consecutive groups of N / M (arXiv 2305.13245).
    """
    return _forward(q, k, v, kernel, window)[0]


Kept = tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> tuple[jax.Array, Kept]:
    dims, kept_dims = _kept_dims(q, k, v, kernel, window)
    run = functools.partial(_forward_local, kernel=kernel, window=window, dims=dims)
    out, kept = local(run, (QUERIES, KEYS, KEYS), (QUERIES, kept_dims))(q, k, v)
    return out, (q, k, v, kept)


def _backward(kernel: str, window: int | None, kept: Kept, dout: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, inside = kept
    dims, kept_dims = _kept_dims(q, k, v, kernel, window)
    run = functools.partial(_backward_local, kernel=kernel, window=window, dims=dims)
    return local(run, (QUERIES, KEYS, KEYS, kept_dims, QUERIES), (QUERIES, KEYS, KEYS))(q, k, v, inside, dout)


attention.defvjp(_forward, _backward)
